package recipefile

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// What all files together may be: names, and bytes.
const (
	maxFiles = 100_000
	maxBytes = 4 << 30
)

// Files are what a recipe copies from the host.
type Files struct {
	// dir is the recipe's folder.
	dir  string
	list []file
}

// file is one line of a recipe: a file, or a folder with all in it.
type file struct {
	line         int
	source, path string
	owner        string
	uid, gid     int
	// mode is nil for 0644, 0755 of what its owner may execute, and of folders.
	mode *int64
}

// open opens a regular file or a folder below root.
func open(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errdefs.New(errdefs.NotFound, "%s: there is no such file in the recipe's folder", name)
	case err != nil:
		return nil, errdefs.New(errdefs.Invalid, "%s: it cannot be read in the recipe's folder: %w", name, err)
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() && !info.IsDir() {
		return nil, errors.Join(errdefs.New(errdefs.Invalid, "%s: it is neither a file nor a folder", name), err, f.Close())
	}
	return f, nil
}

// WriteTar writes all files as a tar whose names are relative to the image's
// root. What is no longer there as it was is an error.
func (files *Files) WriteTar(ctx context.Context, w io.Writer) error {
	root, err := os.OpenRoot(files.dir)
	if err != nil {
		return errdefs.New(errdefs.Storage, "copy the recipe's files: %w", err)
	}
	defer root.Close()
	p := packer{ctx: ctx, root: root, tar: tar.NewWriter(w), left: maxBytes}
	for _, f := range files.list {
		if err := p.add(f, f.source, f.path); err != nil {
			return errdefs.New(errdefs.KindOf(err), "copy the recipe's files, line %d: %w", f.line, err)
		}
	}
	return p.tar.Close()
}

// packer counts what it packs.
type packer struct {
	ctx   context.Context
	root  *os.Root
	tar   *tar.Writer
	count int
	left  int64
}

// add packs source as name.
func (p *packer) add(f file, source, name string) error {
	if p.ctx.Err() != nil {
		return p.ctx.Err()
	}
	opened, err := open(p.root, source)
	if err != nil {
		return err
	}
	defer opened.Close()
	info, err := opened.Stat()
	if err != nil {
		return errdefs.New(errdefs.Storage, "%s: %w", source, err)
	}
	h := &tar.Header{
		Typeflag: tar.TypeReg, Name: strings.TrimPrefix(name, "/"), Size: info.Size(), Mode: 0o644, Uid: f.uid, Gid: f.gid,
		ModTime: info.ModTime().Truncate(time.Second), Format: tar.FormatPAX,
	}
	if info.IsDir() {
		h.Typeflag, h.Name, h.Size = tar.TypeDir, h.Name+"/", 0
	}
	switch {
	case f.mode != nil:
		h.Mode = *f.mode
	case info.IsDir() || info.Mode()&0o100 != 0:
		h.Mode = 0o755
	}
	p.left -= h.Size
	if p.count++; p.count > maxFiles || p.left < 0 {
		return errdefs.New(errdefs.Invalid, "%s: with it there are more than %d files or %d GiB", source, maxFiles, int64(maxBytes)>>30)
	}
	if err := p.tar.WriteHeader(h); err != nil {
		return errdefs.New(errdefs.Storage, "%s: %w", source, err)
	}
	if info.IsDir() {
		return p.below(f, opened, source, name)
	}
	n, err := io.Copy(p.tar, io.LimitReader(opened, h.Size))
	if err == nil && n != h.Size {
		err = errors.New("it became shorter while it was read")
	}
	return errdefs.As(errdefs.Storage, err)
}

// below packs all that is in a folder.
func (p *packer) below(f file, folder *os.File, source, name string) error {
	entries, err := folder.ReadDir(-1)
	if err != nil {
		return errdefs.New(errdefs.Storage, "%s: %w", source, err)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, entry := range entries {
		if entry.Type()&fs.ModeSymlink != 0 {
			return errdefs.New(errdefs.Invalid, "%s: it is a symbolic link, which is not copied", filepath.Join(source, entry.Name()))
		}
		if err := p.add(f, filepath.Join(source, entry.Name()), path.Join(name, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}
