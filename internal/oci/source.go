package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// source is where the files of an image are. Names are relative and separated
// by slashes; one that leads out is NOT_FOUND.
type source interface {
	open(name string) (f io.ReadCloser, size int64, err error)
	Close() error
}

func openSource(ctx context.Context, path string) (source, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	switch {
	case info.IsDir():
		root, err := os.OpenRoot(path)
		if err != nil {
			return nil, err
		}
		return folder{root}, nil
	case !info.Mode().IsRegular():
		return nil, errdefs.New(errdefs.Invalid, "it is neither a folder nor a file; write what is piped into a file first")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	members, err := listMembers(ctx, f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return &archive{f, members}, nil
}

func notThere(name string) error {
	return errdefs.New(errdefs.NotFound, "it has no file %.300q", name)
}

// folder is a layout in a folder.
type folder struct{ root *os.Root }

func (s folder) open(name string) (io.ReadCloser, int64, error) {
	f, err := s.root.OpenFile(filepath.FromSlash(name), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, notThere(name)
	}
	var errno syscall.Errno
	if err != nil && !errors.As(err, &errno) { // a link that leads out
		err = errdefs.New(errdefs.Invalid, "%.300q in it: %w", name, err)
	}
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errdefs.New(errdefs.Invalid, "%.300q in it is no regular file", name)
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}

func (s folder) Close() error { return s.root.Close() }

// archive is a layout in a tar, which is read in place.
type archive struct {
	file    *os.File
	members map[string]member
}

// member is where the content of a file in a tar is, or what it links to.
type member struct {
	offset, size int64
	link         string
}

func (s *archive) open(name string) (io.ReadCloser, int64, error) {
	// Older versions of docker save store a layer that is there twice as a link.
	at := name
	for range maxLinks {
		m, ok := s.members[at]
		if !ok {
			return nil, 0, notThere(name)
		}
		if m.link == "" {
			return io.NopCloser(io.NewSectionReader(s.file, m.offset, m.size)), m.size, nil
		}
		at = m.link
	}
	return nil, 0, errdefs.New(errdefs.Invalid, "%.300q in it is a link to itself", name)
}

// maxLinks is how many links in a tar are followed for one name, as in Linux.
const maxLinks = 40

func (s *archive) Close() error { return s.file.Close() }

// listMembers reads the headers of a tar.
func listMembers(ctx context.Context, f *os.File) (map[string]member, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if err := checkPlain(f); err != nil {
		return nil, err
	}
	members := make(map[string]member)
	// The reader has no buffer: behind a header f is where the content begins.
	r := tar.NewReader(f)
	for count := 0; ; count++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return members, nil
		}
		if err != nil {
			return nil, errdefs.New(errdefs.Invalid, "it is no tar, or damaged or cut off: %w", err)
		}
		if count == maxMembers {
			return nil, errdefs.New(errdefs.Invalid, "it has more than %d files; give an OCI layout or the output of docker save", maxMembers)
		}
		if len(h.Name)+len(h.Linkname) > maxMemberName {
			return nil, errdefs.New(errdefs.Invalid, "the name %.300q in it is too long", h.Name)
		}
		m, ok, err := memberOf(h, f, info.Size())
		if err != nil {
			return nil, err
		}
		if ok {
			members[path.Clean(h.Name)] = m
		}
	}
}

// memberOf returns false for what is neither a file nor a link to one.
func memberOf(h *tar.Header, f *os.File, end int64) (member, bool, error) {
	switch h.Typeflag {
	case tar.TypeReg:
	case tar.TypeSymlink:
		return member{link: path.Join(path.Dir(h.Name), h.Linkname)}, true, nil
	case tar.TypeLink:
		return member{link: path.Clean(h.Linkname)}, true, nil
	case tar.TypeGNUSparse:
		return member{}, false, errdefs.New(errdefs.Unsupported, "%.300q in it is stored with holes; make the tar without", h.Name)
	default:
		return member{}, false, nil
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return member{}, false, errdefs.New(errdefs.Unsupported, "%.300q in it is stored with holes; make the tar without", h.Name)
		}
	}
	offset, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return member{}, false, err
	}
	if h.Size > end-offset {
		return member{}, false, errdefs.New(errdefs.Invalid, "it is cut off in %.300q", h.Name)
	}
	return member{offset: offset, size: h.Size}, true, nil
}

// checkPlain refuses a compressed tar, in which nothing could be found again.
func checkPlain(f *os.File) error {
	head := make([]byte, 6)
	n, err := f.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	for magic, remedy := range map[string]string{gzipMagic: "gunzip", zstdMagic: "zstd -d", xzMagic: "unxz", bzip2Magic: "bunzip2"} {
		if bytes.HasPrefix(head[:n], []byte(magic)) {
			return errdefs.New(errdefs.Unsupported, "it is compressed; unpack it with %s first", remedy)
		}
	}
	return nil
}

// How compressed streams begin.
const (
	gzipMagic  = "\x1f\x8b"
	zstdMagic  = "\x28\xb5\x2f\xfd"
	xzMagic    = "\xfd7zXZ\x00"
	bzip2Magic = "BZh"
)
