package kernel

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Limits on an initial RAM disk; bytes are those after unpacking.
const (
	maxUnpacked = 2 << 30
	maxEntries  = 200_000
	maxName     = 4096
)

// Initrd is an initial RAM disk as distributions make them: one or several cpio
// archives in a row, the last of them usually compressed (the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst).
type Initrd struct {
	// File is read at any offset; it stays its owner's.
	File *os.File
	// Version is the kernel's whose modules are looked for.
	Version string
}

// ReadFiles implements Folder. The archive is read to its end each time.
func (d Initrd) ReadFiles(ctx context.Context, names []string, limit int64) (map[string][]byte, error) {
	found := map[string][]byte{}
	err := d.walk(ctx, func(name string, size int64, content io.Reader) error {
		below, ok := strings.CutPrefix(strings.TrimPrefix(path.Clean("/"+name), "/usr"), "/lib/modules/"+d.Version+"/")
		if !ok || !slices.Contains(names, below) {
			return nil
		}
		if size > limit {
			return errdefs.New(errdefs.Invalid, "%s in the initrd is longer than %d bytes", name, limit)
		}
		data, err := io.ReadAll(content)
		found[below] = data
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the initrd %s: %w", d.File.Name(), err)
	}
	return found, nil
}

// walk visits the regular files of all archives.
func (d Initrd) walk(ctx context.Context, visit visitor) error {
	info, err := d.File.Stat()
	if err != nil {
		return err
	}
	file := bufio.NewReaderSize(io.NewSectionReader(d.File, 0, info.Size()), 64<<10)
	w := &walker{ctx: ctx, left: maxUnpacked, visit: visit}
	suffix, err := w.archives(file)
	if err != nil || suffix == "" {
		return err
	}
	r, err := unpacker(ctx, suffix, file)
	if err != nil {
		return errdefs.New(errdefs.Invalid, "%w", err)
	}
	defer r.Close()
	inner, err := w.archives(bufio.NewReaderSize(r, 64<<10))
	if err == nil && inner != "" {
		err = errdefs.New(errdefs.Invalid, "it is compressed twice")
	}
	return err
}

// visitor is called with each regular file; what it leaves of the content is
// skipped.
type visitor func(name string, size int64, content io.Reader) error

// walker walks through archives, with limits over all of them.
type walker struct {
	ctx     context.Context
	left    int64
	entries int
	visit   visitor
}

// archives reads one archive after the other, until the end or something
// compressed, whose suffix it returns.
func (w *walker) archives(r *bufio.Reader) (suffix string, err error) {
	for {
		magic, err := r.Peek(6)
		switch {
		case len(magic) > 0 && magic[0] == 0:
			_, err := r.Discard(1)
			if w.left--; err != nil || w.left < 0 {
				return "", invalid(err, "it unpacks to more than is read")
			}
			continue
		case len(magic) == 0 && errors.Is(err, io.EOF):
			return "", nil
		case len(magic) < 6:
			return "", invalid(err, "it ends in the middle")
		}
		switch {
		case isNewc(magic):
			if err := w.archive(r); err != nil {
				return "", err
			}
			continue
		case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
			return ".gz", nil
		case bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
			return ".zst", nil
		case string(magic) == "\xfd7zXZ\x00":
			return ".xz", nil
		}
		return "", errdefs.New(errdefs.Unsupported, "it is no cpio archive, plain or compressed with gzip, xz or zstd")
	}
}

func isNewc(magic []byte) bool { return string(magic) == "070701" || string(magic) == "070702" }

func invalid(err error, text string) error {
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return errdefs.New(errdefs.Invalid, "%s: %w", text, err)
	}
	return errdefs.New(errdefs.Invalid, "%s", text)
}

// archive reads one archive up to its trailer.
func (w *walker) archive(r *bufio.Reader) error {
	const header = 110
	for {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		var h [header]byte
		if _, err := io.ReadFull(r, h[:]); err != nil {
			return invalid(err, "it ends in the middle")
		}
		field := func(i int) int64 {
			n, err := strconv.ParseUint(string(h[6+8*i:14+8*i]), 16, 32)
			if err != nil {
				return -1
			}
			return int64(n)
		}
		mode, size, length := field(1), field(6), field(11)
		w.entries++
		w.left -= header + size + length
		if !isNewc(h[:6]) || mode < 0 || size < 0 || length < 1 || length > maxName {
			return errdefs.New(errdefs.Invalid, "an entry of its archive is damaged")
		}
		if w.left < 0 || w.entries > maxEntries {
			return errdefs.New(errdefs.Invalid, "it has more files or bytes than are read")
		}
		text := make([]byte, length+(-(header+length))&3)
		if _, err := io.ReadFull(r, text); err != nil {
			return invalid(err, "it ends in the middle")
		}
		name := string(bytes.TrimRight(text[:length], "\x00"))
		if name == "TRAILER!!!" {
			return nil
		}
		content := io.LimitReader(r, size)
		if mode&0o170000 == 0o100000 {
			if err := w.visit(name, size, content); err != nil {
				return err
			}
		}
		rest := content.(*io.LimitedReader).N + (-size)&3
		if n, err := io.CopyN(io.Discard, r, rest); err != nil || n != rest {
			return invalid(err, "it ends in the middle")
		}
	}
}
