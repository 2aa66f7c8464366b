package tarstream

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/tarstream/whole"
)

// Unpack unpacks the archive r below dir, which is made if it is not there.
// What exists under an entry's name is replaced, but a folder only merged
// into, keeping its mode. An archive without an end mark is cut off, INVALID. On
// error what was unpacked stays, but for the entry that failed.
func Unpack(ctx context.Context, r io.Reader, dir string, opt Options) (Result, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Result{}, kinded("unpack into", dir, err)
	}
	return unpack(ctx, newReader(r), nil, target{dir: dir}, opt)
}

// UnpackAs unpacks the archive r, which holds one file or folder, the way cp
// does: if name is a folder, into it; otherwise the top entry gets name's last
// element as its name. A name that ends in a slash must be a folder, unless
// the top entry is one.
func UnpackAs(ctx context.Context, r io.Reader, name string, opt Options) (Result, error) {
	tr := newReader(r)
	first, err := tr.Next()
	if err != nil {
		return Result{}, readError(err)
	}
	t, err := resolve(name, first)
	if err != nil {
		return Result{}, err
	}
	return unpack(ctx, tr, first, t, opt)
}

// target is where an archive goes: below dir, the top entry as base if that
// is not empty.
type target struct{ dir, base string }

func resolve(name string, first *tar.Header) (target, error) {
	folder := first.Typeflag == tar.TypeDir
	fi, err := os.Stat(name)
	switch {
	case err == nil && fi.IsDir():
		return target{dir: name}, nil
	case err == nil && folder:
		return target{}, errdefs.New(errdefs.Invalid, "unpack to %q: it is a file, and what comes is a folder", name)
	case err == nil:
		if name, err = filepath.EvalSymlinks(name); err != nil {
			return target{}, kinded("unpack to", name, err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return target{}, kinded("unpack to", name, err)
	case endsInSlash(name) && !folder:
		return target{}, errdefs.New(errdefs.NotFound, "unpack to %q: no such folder; create it first", name)
	default:
		if _, err := os.Lstat(filepath.Clean(name)); err == nil {
			return target{}, errdefs.New(errdefs.Invalid, "unpack to %q: it is a symbolic link that leads nowhere", name)
		}
	}
	name = filepath.Clean(name)
	t := target{dir: filepath.Dir(name), base: filepath.Base(name)}
	if fi, err := os.Stat(t.dir); err != nil || !fi.IsDir() {
		return target{}, errdefs.New(errdefs.NotFound, "unpack to %q: no such folder %q; create it first", name, t.dir)
	}
	return t, nil
}

func endsInSlash(name string) bool {
	return name != "" && os.IsPathSeparator(name[len(name)-1])
}

func newReader(r io.Reader) *whole.Reader {
	return whole.NewReader(bufio.NewReaderSize(r, chunk))
}

func readError(err error) error {
	switch {
	case errors.Is(err, whole.ErrEmpty), errors.Is(err, whole.ErrNoMark):
		return errdefs.New(errdefs.Invalid, "unpack: %w; look at what was to write it, and copy again", err)
	case errors.Is(err, io.EOF):
		return errdefs.New(errdefs.Invalid, "unpack: %w", whole.ErrEmpty)
	case errors.Is(err, tar.ErrHeader), errors.Is(err, io.ErrUnexpectedEOF):
		return errdefs.New(errdefs.Invalid, "unpack: the archive is damaged or cut off: %w", err)
	}
	return fmt.Errorf("unpack: %w", err)
}

// unpacker is the state of one unpacking.
type unpacker struct {
	ctx  context.Context
	root *os.Root
	t    target
	opt  Options
	top  string // first element of the archive's names
	res  Result
	bufs pair
	// real are the folders known to be no links.
	real map[string]bool
	// made are the folders that get their mode and time at the end.
	made []madeFolder
}

type madeFolder struct {
	name string
	h    *tar.Header
}

func unpack(ctx context.Context, tr *whole.Reader, first *tar.Header, t target, opt Options) (Result, error) {
	root, err := os.OpenRoot(t.dir)
	if err != nil {
		return Result{}, kinded("unpack into", t.dir, err)
	}
	defer root.Close()
	u := &unpacker{
		ctx: ctx, root: root, t: t, opt: opt,
		real: map[string]bool{".": true},
	}
	for h := first; ; h = nil {
		if err := context.Cause(ctx); err != nil {
			return u.res, err
		}
		if h == nil {
			if h, err = tr.Next(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return u.res, readError(err)
			}
		}
		if err := u.entry(h, tr); err != nil {
			return u.res, err
		}
	}
	return u.res, u.finishFolders()
}

// place returns where the entry of that name goes, relative to the root.
func (u *unpacker) place(name string) (string, error) {
	clean, err := localName(name)
	if err != nil || u.t.base == "" {
		return clean, err
	}
	first, rest, _ := strings.Cut(clean, "/")
	if u.top == "" {
		u.top = first
	}
	if first != u.top && u.top != "." {
		return "", errdefs.New(errdefs.Invalid, "archive entry %q: the archive holds more than %q", name, u.top)
	}
	if u.top == "." {
		return path.Join(u.t.base, clean), nil
	}
	return path.Join(u.t.base, rest), nil
}

// entry unpacks one entry.
func (u *unpacker) entry(h *tar.Header, r io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil // a comment of git archive
	}
	name, err := u.place(h.Name)
	if err != nil {
		return err
	}
	if u.opt.MaxFiles > 0 && u.res.Files >= uint64(u.opt.MaxFiles) {
		return errdefs.New(errdefs.Invalid, "archive entry %q: more than %d files", h.Name, u.opt.MaxFiles)
	}
	if err := u.parents(path.Dir(name)); err != nil {
		return err
	}
	u.res.Files++
	switch h.Typeflag {
	case tar.TypeDir:
		return u.folder(name, h)
	case tar.TypeReg, tar.TypeGNUSparse:
		return u.file(name, h, r)
	case tar.TypeSymlink:
		return u.symlink(name, h)
	case tar.TypeLink:
		return u.hardLink(name, h)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return u.special(name, h)
	}
	return errdefs.New(errdefs.Invalid, "archive entry %q: unknown type %q", h.Name, h.Typeflag)
}

// parents makes the folder dir; none on the way may be a link.
func (u *unpacker) parents(dir string) error {
	if u.real[dir] {
		return nil
	}
	if err := u.parents(path.Dir(dir)); err != nil {
		return err
	}
	fi, err := u.root.Lstat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := u.root.Mkdir(dir, 0o755); err != nil {
			return kinded("make folder", dir, err)
		}
	case err != nil:
		return kinded("unpack below", dir, err)
	case !fi.IsDir():
		return errdefs.New(errdefs.Invalid, "unpack below %q: it is not a folder (links are not followed)", dir)
	}
	u.real[dir] = true
	return nil
}

// clear removes what is called name, unless it is a folder.
func (u *unpacker) clear(name string) error {
	fi, err := u.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return kinded("replace", name, err)
	case fi.IsDir():
		return errdefs.New(errdefs.Invalid, "replace %q: it is a folder, and what comes is none", name)
	}
	return kinded("replace", name, u.root.Remove(name))
}

func (u *unpacker) folder(name string, h *tar.Header) error {
	fi, err := u.root.Lstat(name)
	switch {
	case err == nil && fi.IsDir():
	case err == nil:
		return errdefs.New(errdefs.Invalid, "unpack folder %q: a file of that name is there", name)
	case errors.Is(err, fs.ErrNotExist):
		if err := u.root.Mkdir(name, 0o700); err != nil {
			return kinded("make folder", name, err)
		}
		u.made = append(u.made, madeFolder{name, h})
	default:
		return kinded("unpack folder", name, err)
	}
	u.real[name] = true
	return nil
}

// finishFolders sets modes and times, inner folders first.
func (u *unpacker) finishFolders() error {
	for i := len(u.made) - 1; i >= 0; i-- {
		name, h := u.made[i].name, u.made[i].h
		if u.opt.Owners {
			if err := u.root.Lchown(name, h.Uid, h.Gid); err != nil {
				return kinded("give an owner to", name, err)
			}
		}
		if err := u.root.Chmod(name, u.mode(h)); err != nil {
			return kinded("set the mode of", name, err)
		}
		if err := u.root.Chtimes(name, time.Time{}, h.ModTime); err != nil {
			return kinded("set the time of", name, err)
		}
	}
	return nil
}

// mode is h's as far as the options let it be carried.
func (u *unpacker) mode(h *tar.Header) fs.FileMode {
	m := fs.FileMode(h.Mode & 0o777)
	if h.Mode&0o1000 != 0 {
		m |= fs.ModeSticky
	}
	if u.opt.Owners && h.Mode&0o4000 != 0 {
		m |= fs.ModeSetuid
	}
	if u.opt.Owners && h.Mode&0o2000 != 0 {
		m |= fs.ModeSetgid
	}
	return m
}
