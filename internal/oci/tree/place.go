package tree

import (
	"archive/tar"
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Entry is a name in a tree.
type Entry struct {
	// Path is absolute; the root's is "/".
	Path string
	Attributes
	// Links counts the names of a file in the tree, this one among them; it is
	// 1 for a folder.
	Links int
}

// Walk calls visit for each name: a folder before what is in it, names in
// order of their bytes. The entry's maps are the tree's.
func (t *Tree) Walk(visit func(Entry) error) error {
	t.count()
	return walk("/", t.root, visit)
}

func walk(name string, n *node, visit func(Entry) error) error {
	if err := visit(Entry{Path: name, Attributes: n.Attributes, Links: n.links}); err != nil {
		return err
	}
	for _, base := range slices.Sorted(maps.Keys(n.children)) {
		if err := walk(path.Join(name, base), n.children[base], visit); err != nil {
			return err
		}
	}
	return nil
}

// count counts each file's names.
func (t *Tree) count() {
	var each func(*node, func(*inode))
	each = func(n *node, f func(*inode)) {
		f(n.inode)
		for _, child := range n.children {
			each(child, f)
		}
	}
	each(t.root, func(n *inode) { n.links, n.unplaced = 0, 0 })
	each(t.root, func(n *inode) { n.links++; n.unplaced++ })
}

// Place builds the tree of names in dir, an empty folder on the same file
// system as the scratch folder. The content moves there: a tree can be placed
// once, and ReadFile no longer works after it. What is there belongs to whoever
// runs this, files with the mode 0600 and folders with 0700 whatever the image
// says, and devices are left out; all of that needs root, and Walk tells it.
// Names, links and content, holes included, are as in the image. What has been
// placed when it fails stays.
func (t *Tree) Place(ctx context.Context, dir string) error {
	t.count()
	scratch, err := openFolder(unix.AT_FDCWD, t.scratch)
	if err != nil {
		return placeError(t.scratch, err)
	}
	defer unix.Close(scratch)
	fd, err := openFolder(unix.AT_FDCWD, dir)
	if err != nil {
		return placeError(dir, err)
	}
	defer unix.Close(fd)
	p := placer{ctx: ctx, scratch: scratch}
	return p.folder(fd, "/", t.root)
}

// placer builds a tree through descriptors of folders it has made itself, one
// element of a path at a time, and follows no link.
type placer struct {
	ctx     context.Context
	scratch int
	extra   int // the last number of a file that has several names and no content, below 0
}

// folder places what is in a folder that is there already.
func (p *placer) folder(fd int, name string, n *node) error {
	for _, base := range slices.Sorted(maps.Keys(n.children)) {
		if err := p.ctx.Err(); err != nil {
			return fmt.Errorf("place %.300q: %w", name, err)
		}
		if err := p.child(fd, base, path.Join(name, base), n.children[base]); err != nil {
			return err
		}
	}
	return nil
}

func (p *placer) child(parent int, base, name string, n *node) error {
	switch n.Type {
	case tar.TypeChar, tar.TypeBlock:
		return nil
	case tar.TypeDir:
	default:
		return placeError(name, p.file(parent, base, n.inode))
	}
	if err := unix.Mkdirat(parent, base, 0o700); err != nil {
		return placeError(name, err)
	}
	fd, err := openFolder(parent, base)
	if err != nil {
		return placeError(name, err)
	}
	defer unix.Close(fd)
	return p.folder(fd, name, n)
}

// file places one name of a file: the last moves it there, those before are
// links to where it is until then.
func (p *placer) file(parent int, base string, n *inode) error {
	n.unplaced--
	if n.content == 0 {
		if n.links == 1 {
			return makeFile(parent, base, n)
		}
		p.extra--
		n.content = p.extra
		if err := makeFile(p.scratch, strconv.Itoa(n.content), n); err != nil {
			return err
		}
	}
	own := strconv.Itoa(n.content)
	if n.unplaced > 0 {
		return unix.Linkat(p.scratch, own, parent, base, 0)
	}
	return unix.Renameat(p.scratch, own, parent, base)
}

// makeFile makes what has no content.
func makeFile(parent int, base string, n *inode) error {
	switch n.Type {
	case tar.TypeSymlink:
		return unix.Symlinkat(n.Target, parent, base)
	case tar.TypeFifo:
		return unix.Mkfifoat(parent, base, 0o600)
	}
	fd, err := unix.Openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func openFolder(parent int, base string) (int, error) {
	return unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

func placeError(name string, err error) error {
	if err == nil {
		return nil
	}
	kind := errdefs.Storage
	if err == unix.ENOSPC || err == unix.EDQUOT {
		kind = errdefs.NoSpace
	}
	return errdefs.New(kind, "place %.300q: %w", name, err)
}
