// Package tree merges the layers of a container image into the one tree of
// files that a container would see, and places it on disk. It knows tars and
// their whiteouts, not images: where layers come from and whether they are
// whole is package oci's business.
//
// A layer is hostile. Names, links, whiteouts and owners are merged in memory
// only; on disk a layer touches nothing but files of a scratch folder that are
// called by number, until Place builds the tree of names that were all
// checked.
package tree

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Limits on what all layers together may hold. Docker's largest official
// images have some 100,000 files.
const (
	maxEntries = 1_000_000
	maxHeaders = 256 << 20 // bytes of names, link targets and attributes
	maxDepth   = 128       // folders inside one another
	maxPath    = 3 << 10   // bytes of a path as a layer writes it
	maxName    = 255       // bytes of one element of a path, and of an attribute's name
	maxXattrs  = 4060      // bytes of one file's attributes as ext4 keeps them, in one block
	maxLinks   = 40        // symbolic links followed for one path, as in Linux
	maxSteps   = 4 << 10   // elements of one path with those links put in
)

// Tree is the merged content of layers. Its life: New, AddLayer for each layer
// from the lowest, then User, ReadFile and Walk as often as wanted, and Place
// once. Names, owners and links are in memory, the content of files in the
// scratch folder, whose owner removes it when the tree is done with. A tree is
// for one goroutine at a time.
type Tree struct {
	root    *node
	scratch string
	buf     []byte
	// How many layers, entries, bytes of headers and scratch files there were.
	layers, entries, headers, contents int
}

// New returns an empty tree. scratch is an empty folder that nobody else writes
// to; it gets the content of files, also of those that a later layer removes.
func New(scratch string) *Tree {
	return &Tree{root: newFolder(0), scratch: scratch, buf: make([]byte, 256<<10)}
}

// Attributes are what a file has besides its names and its content.
type Attributes struct {
	// Type is tar.TypeReg, TypeDir, TypeSymlink, TypeChar, TypeBlock or TypeFifo.
	Type byte
	// Mode has the permissions and the set-user-ID, set-group-ID and sticky
	// bits as the kernel numbers them: 0o7777 at most.
	Mode     uint32
	UID, GID uint32
	// Major and Minor are a device's.
	Major, Minor uint32
	ModTime      time.Time
	// Target is a symbolic link's, whatever it says.
	Target string
	// Size is a file's in bytes, with holes.
	Size int64
	// Xattrs are the extended attributes of the name spaces that Linux has.
	Xattrs map[string]string
}

// inode is a file; hard links share one.
type inode struct {
	Attributes
	// content is the number of the scratch file with its content; 0 for none.
	content int
	// links counts the names in the tree, unplaced those that Place has still
	// to do; count sets both.
	links, unplaced int
}

// node is a name in a folder.
type node struct {
	*inode
	// layer is the last one that named it or anything below it, from 1.
	layer int
	// pruned is the last layer that removed all that is in it from those below.
	pruned   int
	children map[string]*node
}

func (n *node) isDir() bool { return n.Type == tar.TypeDir }

// newFolder is a folder that no layer describes.
func newFolder(layer int) *node {
	return &node{
		inode: &inode{Attributes: Attributes{Type: tar.TypeDir, Mode: 0o755, ModTime: time.Unix(0, 0)}},
		layer: layer, children: map[string]*node{},
	}
}

var errLoop = errors.New("its symbolic links lead in a circle")

// walker finds names in a tree, as the kernel would with the tree as its root:
// links are followed within it, and ".." of the root is the root.
type walker struct {
	root *node
	// create makes folders that are missing, for the layer, and marks those on
	// the way as named by it.
	create bool
	layer  int

	links, steps int

	trail []*node // from the root to the folder reached
}

// folder goes to the folder at the path. It is fs.ErrNotExist or, for what is
// there and no folder, fs.ErrInvalid otherwise.
func (w *walker) folder(p string) (*node, error) {
	if w.trail == nil || strings.HasPrefix(p, "/") {
		w.trail = append(w.trail[:0], w.root)
	}
	for element := range strings.SplitSeq(p, "/") {
		if err := w.step(element); err != nil {
			return nil, err
		}
	}
	return w.here(), nil
}

func (w *walker) here() *node { return w.trail[len(w.trail)-1] }

func (w *walker) step(element string) error {
	if w.steps++; w.steps > maxSteps {
		return errTooDeep
	}
	at := w.here()
	if w.create {
		at.layer = w.layer
	}
	switch element {
	case "", ".":
		return nil
	case "..":
		w.trail = w.trail[:max(1, len(w.trail)-1)]
		return nil
	}
	next := at.children[element]
	switch {
	case next == nil && !w.create:
		return fs.ErrNotExist
	case next == nil && (len(w.trail) > maxDepth || len(element) > maxName):
		return errTooDeep
	case next == nil:
		next = newFolder(w.layer)
		at.children[element] = next
	case next.Type == tar.TypeSymlink:
		if w.links++; w.links > maxLinks {
			return errLoop
		}
		_, err := w.folder(next.Target)
		return err
	case !next.isDir():
		return fs.ErrInvalid
	}
	if w.create {
		next.layer = w.layer
	}
	w.trail = append(w.trail, next)
	return nil
}

// find returns the file at the path, through all symbolic links.
func (t *Tree) find(p string) (*node, error) {
	w := walker{root: t.root}
	for {
		dir, base := path.Split(p)
		if base == "" || base == "." || base == ".." {
			return w.folder(p)
		}
		folder, err := w.folder(dir)
		if err != nil {
			return nil, err
		}
		found := folder.children[base]
		switch {
		case found == nil:
			return nil, fs.ErrNotExist
		case found.Type != tar.TypeSymlink:
			return found, nil
		}
		if w.links++; w.links > maxLinks {
			return nil, errLoop
		}
		p = found.Target
	}
}

// ReadFile returns the content of a regular file, found as a program in the
// tree would find it: links are followed and never lead out. A missing one is
// NOT_FOUND, what is no file or longer than limit bytes INVALID.
func (t *Tree) ReadFile(name string, limit int64) ([]byte, error) {
	n, err := t.find(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errdefs.New(errdefs.NotFound, "read %.300q in the image: it does not exist", name)
	case err != nil:
		return nil, errdefs.New(errdefs.Invalid, "read %.300q in the image: %w", name, err)
	case n.Type != tar.TypeReg:
		return nil, errdefs.New(errdefs.Invalid, "read %.300q in the image: it is no file", name)
	case n.Size > limit:
		return nil, errdefs.New(errdefs.Invalid, "read %.300q in the image: it has %d bytes, more than %d", name, n.Size, limit)
	case n.content == 0:
		return nil, nil
	}
	f, err := os.Open(t.content(n.inode))
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "read %.300q in the image: %w", name, err)
	}
	defer f.Close()
	data := make([]byte, n.Size)
	if _, err := io.ReadFull(f, data); err != nil {
		return nil, errdefs.New(errdefs.Storage, "read %.300q in the image: %w", name, err)
	}
	return data, nil
}

// content is the path of the scratch file with a file's content.
func (t *Tree) content(n *inode) string {
	return filepath.Join(t.scratch, strconv.Itoa(n.content))
}
