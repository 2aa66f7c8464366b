package tree

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// What begins the names that say what a layer removes.
const (
	whiteout     = ".wh."
	whiteoutMeta = ".wh..wh."     // of aufs' own files, but for:
	opaque       = ".wh..wh..opq" // all of the folder below
)

var errTooDeep = errors.New("its path is too long or too deep")

// AddLayer reads a layer's tar to its end and merges it over those before; what
// follows the archive's end is left in r. charge is called with the size of
// each file, in bytes with holes counted, before its content is read; its error
// ends the reading. After an error the tree is of no use. What is wrong with an
// entry is INVALID and names it; errors of r, of reading a tar and of the
// scratch folder are as they come.
func (t *Tree) AddLayer(r io.Reader, charge func(size int64) error) error {
	t.layers++
	m := merger{tree: t, layer: t.layers, tar: tar.NewReader(r), charge: charge}
	for {
		h, err := m.tar.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := m.entry(h); err != nil {
			return err
		}
	}
}

// merger merges one layer.
type merger struct {
	tree   *Tree
	layer  int
	tar    *tar.Reader
	charge func(size int64) error
}

// entry merges one entry. Errors name it.
func (m *merger) entry(h *tar.Header) error {
	if m.tree.entries++; m.tree.entries > maxEntries {
		return errdefs.New(errdefs.Invalid, "with it the image has more than %d files", maxEntries)
	}
	m.tree.headers += len(h.Name) + len(h.Linkname)
	for key, value := range h.PAXRecords {
		m.tree.headers += len(key) + len(value)
	}
	if m.tree.headers > maxHeaders {
		return errdefs.New(errdefs.Invalid, "with it the image has more than %d bytes of names and attributes", maxHeaders)
	}
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	err := m.named(h)
	var pe *fs.PathError // of the scratch folder
	switch {
	case err == nil, errors.As(err, &pe), errdefs.KindOf(err) != errdefs.Internal:
		return err
	case errors.Is(err, fs.ErrInvalid):
		err = errors.New("something above it is no folder")
	case errors.Is(err, fs.ErrNotExist):
		err = errors.New("what it links to does not exist")
	}
	return errdefs.New(errdefs.Invalid, "entry %.300q: %w", h.Name, err)
}

// named merges an entry by its name: it removes, is passed over, or is there
// to be found in the tree.
func (m *merger) named(h *tar.Header) error {
	name, err := entryName(h.Name)
	if err != nil {
		return err
	}
	for _, element := range strings.Split(path.Dir(name), "/") {
		switch {
		case strings.HasPrefix(element, whiteoutMeta):
			return nil
		case strings.HasPrefix(element, whiteout):
			return errors.New("it is below the name of a whiteout")
		}
	}
	dir, base := path.Split(name)
	if removed, ok := strings.CutPrefix(base, whiteout); ok {
		return m.whiteout(dir, base, removed)
	}
	n, err := newInode(h)
	if err != nil {
		return err
	}
	w := walker{root: m.tree.root, create: true, layer: m.layer}
	folder, err := w.folder(dir)
	if err != nil {
		return err
	}
	if base == "" || base == "." {
		if n.Type != tar.TypeDir {
			return errors.New("it would be the root and is no folder")
		}
		m.tree.root.inode = n
		return nil
	}
	if len(w.trail) > maxDepth {
		return errTooDeep
	}
	return m.put(folder, base, n, h)
}

// entryName checks a name and makes it relative; the root is ".".
func entryName(name string) (string, error) {
	if name == "" || strings.ContainsRune(name, 0) {
		return "", errors.New("it has no name, or a zero byte in it")
	}
	if len(name) > maxPath {
		return "", errTooDeep
	}
	for element := range strings.SplitSeq(name, "/") {
		switch {
		case element == "..":
			return "", errors.New("its name leads out of its folder")
		case len(element) > maxName:
			return "", errTooDeep
		}
	}
	return path.Clean(strings.TrimLeft(name, "/")), nil
}

// put gives the folder the entry; base is what it is called there. A folder
// over a folder keeps what is in it; everything else is replaced.
func (m *merger) put(folder *node, base string, n *inode, h *tar.Header) error {
	old := folder.children[base]
	switch h.Typeflag {
	case tar.TypeLink:
		target, err := m.linkTarget(h.Linkname)
		if err != nil {
			return err
		}
		if old != nil && old.inode == target {
			old.layer = m.layer
			return nil
		}
		n = target
	case tar.TypeReg:
		if err := m.keep(n); err != nil {
			return err
		}
	case tar.TypeDir:
		if old != nil && old.isDir() {
			old.inode, old.layer = n, m.layer
			return nil
		}
	}
	fresh := &node{inode: n, layer: m.layer}
	if n.Type == tar.TypeDir {
		fresh.children = map[string]*node{}
	}
	folder.children[base] = fresh
	return nil
}

// linkTarget is the file that a hard link is to.
func (m *merger) linkTarget(name string) (*inode, error) {
	clean, err := entryName(name)
	if err != nil {
		return nil, fmt.Errorf("the target of its link: %w", err)
	}
	dir, base := path.Split(clean)
	w := walker{root: m.tree.root}
	folder, err := w.folder(dir)
	if err != nil {
		return nil, err
	}
	target := folder.children[base]
	switch {
	case target == nil:
		return nil, fs.ErrNotExist
	case target.isDir():
		return nil, errors.New("it is a hard link to a folder")
	}
	return target.inode, nil
}

// keep writes the content of the entry into a scratch file.
func (m *merger) keep(n *inode) error {
	if err := m.charge(n.Size); err != nil {
		return err
	}
	if n.Size == 0 {
		return nil
	}
	m.tree.contents++
	n.content = m.tree.contents
	f, err := os.OpenFile(m.tree.content(n), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	hole := false
	for off := int64(0); off < n.Size; {
		p := m.tree.buf[:min(int64(len(m.tree.buf)), n.Size-off)]
		if _, err := io.ReadFull(m.tar, p); err != nil {
			return noEOF(err)
		}
		// What is zeros becomes a hole, so that a file that is all hole does
		// not fill the disk.
		if hole = allZero(p); !hole {
			if _, err := f.WriteAt(p, off); err != nil {
				return err
			}
		}
		off += int64(len(p))
	}
	if hole {
		if err := f.Truncate(n.Size); err != nil {
			return err
		}
	}
	return f.Close()
}

func allZero(p []byte) bool { return len(bytes.TrimLeft(p, "\x00")) == 0 }

// noEOF: a content that ends early is not an archive that ends.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// whiteout removes what layers below have: a file, or all that is in dir.
func (m *merger) whiteout(dir, base, removed string) error {
	if base != opaque && strings.HasPrefix(base, whiteoutMeta) {
		return nil
	}
	if removed == "" || removed == "." || removed == ".." {
		return errors.New("it is a whiteout of nothing")
	}
	w := walker{root: m.tree.root}
	folder, err := w.folder(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrInvalid) {
		return nil // nothing is there to be removed
	}
	if err != nil {
		return err
	}
	if base == opaque {
		m.prune(folder)
		return nil
	}
	if old := folder.children[removed]; old != nil {
		if old.layer == m.layer {
			m.prune(old)
		} else {
			delete(folder.children, removed)
		}
	}
	return nil
}

// prune removes from a folder what only layers below have named: what a layer
// adds stays, whether its whiteouts come before or after it.
func (m *merger) prune(n *node) {
	if n.pruned == m.layer {
		return
	}
	n.pruned = m.layer
	for name, child := range n.children {
		if child.layer == m.layer {
			m.prune(child)
		} else {
			delete(n.children, name)
		}
	}
}

// newInode checks what a header says of a file.
func newInode(h *tar.Header) (*inode, error) {
	n := &inode{Attributes: Attributes{
		Type: h.Typeflag, Mode: uint32(h.Mode & 0o7777), UID: uint32(h.Uid), GID: uint32(h.Gid), ModTime: clamp(h.ModTime),
	}}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		n.Type, n.Size = tar.TypeReg, h.Size
		h.Typeflag = tar.TypeReg
	case tar.TypeDir, tar.TypeLink, tar.TypeFifo:
	case tar.TypeSymlink:
		if n.Target = h.Linkname; h.Linkname == "" || len(h.Linkname) > 4095 || strings.ContainsRune(h.Linkname, 0) {
			return nil, errors.New("the target of its link is none")
		}
	case tar.TypeChar, tar.TypeBlock:
		if h.Devmajor < 0 || h.Devmajor >= 1<<12 || h.Devminor < 0 || h.Devminor >= 1<<20 {
			return nil, errors.New("it is a device that Linux cannot number")
		}
		n.Major, n.Minor = uint32(h.Devmajor), uint32(h.Devminor)
	default:
		return nil, fmt.Errorf("its type %q is unknown", h.Typeflag)
	}
	if h.Uid < 0 || h.Uid >= math.MaxUint32 || h.Gid < 0 || h.Gid >= math.MaxUint32 {
		return nil, errors.New("its owner is none that Linux can have")
	}
	var err error
	n.Xattrs, err = xattrs(h.PAXRecords)
	return n, err
}

// clamp keeps a time within what ext4 can store.
func clamp(t time.Time) time.Time {
	if t.Unix() < math.MinInt32 || t.Unix() >= 1<<33 {
		return time.Unix(0, 0)
	}
	return t
}

// xattrs takes the attributes out of a header that a Linux file system can
// have; overlayfs' own are not the image's.
func xattrs(records map[string]string) (map[string]string, error) {
	var found map[string]string
	total := 0
	for key, value := range records {
		name, ok := strings.CutPrefix(key, "SCHILY.xattr.")
		space, rest, _ := strings.Cut(name, ".")
		linux := rest != "" && (space == "user" || space == "security" || space == "trusted" ||
			name == "system.posix_acl_access" || name == "system.posix_acl_default")
		if !ok || !linux || strings.HasPrefix(name, "trusted.overlay.") || strings.ContainsRune(name, 0) {
			continue
		}
		// Besides name and value ext4 keeps 16 bytes of each, in words of 4.
		if total += 16 + (len(rest)+3)&^3 + (len(value)+3)&^3; len(name) > maxName || total > maxXattrs {
			return nil, fmt.Errorf("its extended attributes are larger than the %d bytes that ext4 has for them, or one has a name of more than %d; leave some out", maxXattrs, maxName)
		}
		if found == nil {
			found = make(map[string]string)
		}
		found[name] = value
	}
	return found, nil
}
