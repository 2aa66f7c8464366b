package tarstream

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func (u *unpacker) file(name string, h *tar.Header, r io.Reader) error {
	pieces, size, err := described(h)
	if err != nil {
		return err
	}
	if limit := u.opt.MaxBytes; limit > 0 && int64(u.res.Bytes)+h.Size > limit {
		return errdefs.New(errdefs.Invalid, "archive entry %q: more than %d bytes", h.Name, limit)
	}
	if err := u.clear(name); err != nil {
		return err
	}
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return kinded("create", name, err)
	}
	err = u.fill(f, h, r, pieces, size)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = u.root.Chtimes(name, time.Time{}, h.ModTime)
	}
	if err != nil {
		_ = u.root.Remove(name)
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return readError(err)
		}
		return kinded("unpack", name, err)
	}
	u.res.Bytes += uint64(h.Size)
	return nil
}

// fill gives the new file f its content, owner and mode.
func (u *unpacker) fill(f *os.File, h *tar.Header, r io.Reader, pieces []piece, size int64) error {
	need := chunk
	if u.opt.Direct && h.Size >= directSize {
		need = directChunk
	}
	buf, next := u.bufs.of(need)
	if err := writePieces(u.ctx, newDirectFile(f, h.Size, u.opt.Direct), r, pieces, size, buf, next); err != nil {
		return err
	}
	if u.opt.Owners {
		if err := f.Chown(h.Uid, h.Gid); err != nil {
			return err
		}
	}
	return f.Chmod(u.mode(h))
}

func (u *unpacker) symlink(name string, h *tar.Header) error {
	if err := u.clear(name); err != nil {
		return err
	}
	if err := u.root.Symlink(h.Linkname, name); err != nil {
		return kinded("make link", name, err)
	}
	if u.opt.Owners {
		if err := u.root.Lchown(name, h.Uid, h.Gid); err != nil {
			return kinded("give an owner to", name, err)
		}
	}
	return kinded("set the time of", name, setLinkTimes(u.root, path.Dir(name), path.Base(name), h))
}

func (u *unpacker) hardLink(name string, h *tar.Header) error {
	old, err := u.place(h.Linkname)
	if err != nil {
		return err
	}
	if old == name {
		return errdefs.New(errdefs.Invalid, "archive entry %q: it is a link to itself", h.Name)
	}
	if err := u.parents(path.Dir(old)); err != nil {
		return err
	}
	if err := u.clear(name); err != nil {
		return err
	}
	return kinded("make link", name, u.root.Link(old, name))
}

func (u *unpacker) special(name string, h *tar.Header) error {
	skip := func() error {
		u.res.Files--
		u.res.Skipped++
		return nil
	}
	if !u.opt.Special {
		return skip()
	}
	if err := u.clear(name); err != nil {
		return err
	}
	err := makeSpecial(u.root, path.Dir(name), path.Base(name), h)
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, errors.ErrUnsupported):
		return skip()
	case err != nil:
		return kinded("make special file", name, err)
	}
	if u.opt.Owners {
		if err := u.root.Lchown(name, h.Uid, h.Gid); err != nil {
			return kinded("give an owner to", name, err)
		}
	}
	if err := u.root.Chmod(name, u.mode(h)); err != nil {
		return kinded("set the mode of", name, err)
	}
	return kinded("set the time of", name, u.root.Chtimes(name, time.Time{}, h.ModTime))
}
