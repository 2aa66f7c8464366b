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

// Placed is an entry with where it is on disk.
type Placed struct {
	Entry
	// Device and Inode are those of the file system it was placed on.
	Device, Inode uint64
}

// Place builds the tree of names in dir, an empty folder on the same file
// system as the scratch folder, and calls placed for each as Walk does. The
// content moves there: a tree can be placed once, and ReadFile no longer works
// after it. Everything belongs to whoever runs this, files with the mode 0600
// and folders with 0700 whatever the image says; devices and pipes are empty
// files. Names and links, times, content and its holes are as in the image.
// What has been placed when it fails stays.
func (t *Tree) Place(ctx context.Context, dir string, placed func(Placed) error) error {
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
	p := placer{ctx: ctx, tree: t, scratch: scratch, placed: placed}
	return p.folder(unix.AT_FDCWD, dir, fd, "/", t.root)
}

// placer builds a tree through descriptors of folders it has made itself, one
// element of a path at a time, and follows no link.
type placer struct {
	ctx     context.Context
	tree    *Tree
	scratch int
	placed  func(Placed) error
	extra   int // the last number of a file that has several names and no content, below 0
}

// folder places what is in a folder that is there already, then its time.
func (p *placer) folder(parent int, base string, fd int, name string, n *node) error {
	if err := p.report(fd, ".", name, n); err != nil {
		return err
	}
	for _, base := range slices.Sorted(maps.Keys(n.children)) {
		if err := p.ctx.Err(); err != nil {
			return fmt.Errorf("place %.300q: %w", name, err)
		}
		if err := p.child(fd, base, path.Join(name, base), n.children[base]); err != nil {
			return err
		}
	}
	if err := setTime(parent, base, n.inode); err != nil {
		return placeError(name, err)
	}
	return nil
}

func (p *placer) child(parent int, base, name string, n *node) error {
	if !n.isDir() {
		if err := p.file(parent, base, n.inode); err != nil {
			return placeError(name, err)
		}
		return p.report(parent, base, name, n)
	}
	if err := unix.Mkdirat(parent, base, 0o700); err != nil {
		return placeError(name, err)
	}
	fd, err := openFolder(parent, base)
	if err != nil {
		return placeError(name, err)
	}
	defer unix.Close(fd)
	return p.folder(parent, base, fd, name, n)
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
	if err := unix.Renameat(p.scratch, own, parent, base); err != nil {
		return err
	}
	return setTime(parent, base, n)
}

// makeFile makes what has no content, with its time.
func makeFile(parent int, base string, n *inode) error {
	if n.Type == tar.TypeSymlink {
		if err := unix.Symlinkat(n.Target, parent, base); err != nil {
			return err
		}
		return setTime(parent, base, n)
	}
	fd, err := unix.Openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Close(fd); err != nil {
		return err
	}
	return setTime(parent, base, n)
}

func setTime(parent int, base string, n *inode) error {
	t := unix.NsecToTimespec(n.ModTime.UnixNano())
	return unix.UtimesNanoAt(parent, base, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
}

func (p *placer) report(parent int, base, name string, n *node) error {
	if p.placed == nil {
		return nil
	}
	var stat unix.Stat_t
	if err := unix.Fstatat(parent, base, &stat, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return placeError(name, err)
	}
	return p.placed(Placed{
		Entry:  Entry{Path: name, Attributes: n.Attributes, Links: n.links},
		Device: stat.Dev, Inode: stat.Ino,
	})
}

func openFolder(parent int, base string) (int, error) {
	return unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

func placeError(name string, err error) error {
	kind := errdefs.Storage
	if err == unix.ENOSPC || err == unix.EDQUOT {
		kind = errdefs.NoSpace
	}
	return errdefs.New(kind, "place %.300q: %w", name, err)
}
