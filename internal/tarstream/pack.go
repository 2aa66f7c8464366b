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
)

// Pack writes the file or folder at name as a tar stream to w, in pieces of 256
// KiB, and of 2 MiB for what large files hold. The top entry is called as
// name's last element, and "." when name ends in "/." (the folder's content is
// meant then). If name itself is a symbolic link, it is followed; links below
// it are carried as links. Below it sockets are left out; if name itself is a
// socket, device or pipe, the error is INVALID. A file that shrinks while it is
// read is an error, one that vanishes is left out. One of no size that has
// content all the same, as in /proc, is carried as it is at that moment, up to
// 16 MiB.
func Pack(ctx context.Context, w io.Writer, name string) error {
	return pack(ctx, w, name, false)
}

// PackDirect is Pack, but reads of large files what the page cache does not
// have past it. That is faster where the CPU is emulated.
func PackDirect(ctx context.Context, w io.Writer, name string) error {
	return pack(ctx, w, name, true)
}

func pack(ctx context.Context, w io.Writer, name string, direct bool) error {
	real, err := filepath.EvalSymlinks(name)
	if err != nil {
		return kinded("pack", name, err)
	}
	fi, err := os.Lstat(real)
	if err != nil {
		return kinded("pack", name, err)
	}
	top, err := topName(name)
	if err != nil {
		return err
	}
	if !fi.IsDir() && !fi.Mode().IsRegular() {
		return errdefs.New(errdefs.Invalid, "copy %q: it is a %s; only files, folders and links to them can be copied", name, special(fi.Mode()))
	}
	out := bufio.NewWriterSize(w, chunk)
	p := &packer{ctx: ctx, out: out, tw: tar.NewWriter(out), links: map[fileID]string{}, direct: direct}
	if err := p.add(real, top, fi); err != nil {
		return err
	}
	if err := p.tw.Close(); err != nil {
		return err
	}
	return out.Flush()
}

func topName(name string) (string, error) {
	slashed := filepath.ToSlash(name)
	if slashed == "." || strings.HasSuffix(slashed, "/.") {
		return ".", nil
	}
	abs, err := filepath.Abs(name)
	if err != nil {
		return "", kinded("pack", name, err)
	}
	base := filepath.Base(abs)
	if base == string(filepath.Separator) || base == filepath.VolumeName(abs)+`\` {
		return ".", nil
	}
	return base, nil
}

type packer struct {
	ctx   context.Context
	out   *bufio.Writer
	tw    *tar.Writer
	links map[fileID]string // first name of each file with several
	bufs  pair
	// direct is whether large files are read past the page cache.
	direct bool
}

// add packs the file at name, of which fi tells, as entry.
func (p *packer) add(name, entry string, fi fs.FileInfo) error {
	if err := context.Cause(p.ctx); err != nil {
		return err
	}
	h := header(fi, entry)
	switch {
	case h == nil:
		return nil
	case fi.IsDir():
		if err := p.tw.WriteHeader(h); err != nil {
			return kinded("pack", name, err)
		}
		return p.addFolder(name, entry)
	case h.Typeflag == tar.TypeSymlink:
		target, err := os.Readlink(name)
		if err != nil {
			return kinded("pack", name, err)
		}
		h.Linkname = filepath.ToSlash(target)
	case h.Typeflag == tar.TypeReg:
		return p.addFile(name, h, fi)
	}
	if err := p.tw.WriteHeader(h); err != nil {
		return kinded("pack", name, err)
	}
	return nil
}

func (p *packer) addFolder(name, entry string) error {
	f, err := os.Open(name)
	if err != nil {
		return kinded("pack", name, err)
	}
	defer f.Close()
	for {
		list, err := f.ReadDir(1000)
		for _, e := range list {
			fi, err := e.Info()
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return kinded("pack", filepath.Join(name, e.Name()), err)
			}
			if err := p.add(filepath.Join(name, e.Name()), path.Join(entry, e.Name()), fi); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return kinded("pack", name, err)
		}
	}
}

func (p *packer) addFile(name string, h *tar.Header, fi fs.FileInfo) error {
	id, several := linkID(fi)
	if several {
		if first, ok := p.links[id]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return kinded("pack", name, p.tw.WriteHeader(h))
		}
	}
	f, err := openFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return kinded("pack", name, err)
	}
	defer f.Close()
	now, err := f.Stat()
	if err != nil {
		return kinded("pack", name, err)
	}
	if !os.SameFile(fi, now) {
		return fmt.Errorf("pack %q: the file was replaced while it was read; try again", name)
	}
	if several {
		p.links[id] = h.Name
	}
	h.Size = now.Size()
	if h.Size == 0 {
		return p.addSizeless(name, h, f)
	}
	pieces := []piece{{0, h.Size}}
	if mayHaveHoles(now) {
		if pieces, err = dataPieces(f, h.Size); err != nil {
			return kinded("pack", name, err)
		}
		describe(h, pieces)
	}
	if err := p.tw.WriteHeader(h); err != nil {
		return kinded("pack", name, err)
	}
	if h.Size >= chunk {
		// With nothing in it the buffer lets whole chunks through uncopied.
		if err := p.out.Flush(); err != nil {
			return fmt.Errorf("pack %q: %w", name, err)
		}
	}
	need := chunk
	if h.Size >= directSize {
		need = directChunk
	}
	buf, next := p.bufs.of(need)
	from := newDirectFile(f, h.Size, p.direct)
	for _, d := range pieces {
		if err := p.copy(name, from, d, buf, next); err != nil {
			return err
		}
	}
	return nil
}

// copy writes one piece of f. Each part of it is read while the one before is
// written.
func (p *packer) copy(name string, f io.ReaderAt, d piece, buf, next []byte) (err error) {
	half := int64(len(buf))
	var read beside
	defer read.end(&err)
	end := d.off + d.len
	fill := func(into []byte, at int64) error { return fill(name, f, into[:min(half, end-at)], at) }
	if d.len > 0 {
		if err := fill(buf, d.off); err != nil {
			return err
		}
	}
	for off := d.off; off < end; off += half {
		if err := context.Cause(p.ctx); err != nil {
			return err
		}
		if ahead := off + half; ahead < end {
			into := next
			read.begin(func() error { return fill(into, ahead) })
		}
		if _, err := p.tw.Write(buf[:min(half, end-off)]); err != nil {
			return fmt.Errorf("pack %q: %w", name, err)
		}
		if err := read.wait(); err != nil {
			return err
		}
		buf, next = next, buf
	}
	return nil
}

// fill reads all of buf from a place in a file.
func fill(name string, f io.ReaderAt, buf []byte, off int64) error {
	m, err := f.ReadAt(buf, off)
	switch {
	case m == len(buf):
		return nil
	case errors.Is(err, io.EOF):
		return fmt.Errorf("pack %q: the file shrank while it was read; try again", name)
	}
	return kinded("pack", name, err)
}

// maxSizeless is how much a file without a size may have in it, in bytes, and
// sizelessLimit how long it may take to come: files such as /proc/kmsg wait
// for more at their end.
const (
	maxSizeless   = 16 << 20
	sizelessLimit = 5 * time.Second
)

// addSizeless packs a file whose length is told as 0: an empty one, or one that
// is made up by the kernel as it is read.
func (p *packer) addSizeless(name string, h *tar.Header, f *os.File) error {
	_ = f.SetReadDeadline(time.Now().Add(sizelessLimit)) // what cannot have one does not wait
	content, err := io.ReadAll(io.LimitReader(f, maxSizeless+1))
	if err != nil {
		return kinded("pack", name, err)
	}
	if len(content) > maxSizeless {
		return errdefs.New(errdefs.Invalid, "pack %q: the file tells no size and has more than %d MiB in it; copy what is needed of it to another file first",
			name, maxSizeless>>20)
	}
	h.Size = int64(len(content))
	if err := p.tw.WriteHeader(h); err != nil {
		return kinded("pack", name, err)
	}
	if _, err := p.tw.Write(content); err != nil {
		return fmt.Errorf("pack %q: %w", name, err)
	}
	return nil
}

// special says what a file is that is neither regular nor a folder.
func special(m fs.FileMode) string {
	switch {
	case m&fs.ModeNamedPipe != 0:
		return "pipe"
	case m&fs.ModeSocket != 0:
		return "socket"
	case m&fs.ModeDevice != 0:
		return "device"
	}
	return "special file"
}

// header describes fi, or is nil for what cannot be carried.
func header(fi fs.FileInfo, entry string) *tar.Header {
	m := fi.Mode()
	h := &tar.Header{
		Format: tar.FormatPAX, Name: entry, ModTime: fi.ModTime(),
		Mode: int64(m.Perm()),
	}
	for bit, value := range map[fs.FileMode]int64{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if m&bit != 0 {
			h.Mode |= value
		}
	}
	switch {
	case m.IsDir():
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case m.IsRegular():
		h.Typeflag, h.Size = tar.TypeReg, fi.Size()
	case m&fs.ModeSymlink != 0:
		h.Typeflag = tar.TypeSymlink
	case m&fs.ModeNamedPipe != 0:
		h.Typeflag = tar.TypeFifo
	case m&fs.ModeCharDevice != 0:
		h.Typeflag = tar.TypeChar
	case m&fs.ModeDevice != 0:
		h.Typeflag = tar.TypeBlock
	default:
		return nil
	}
	fillSystem(h, fi)
	return h
}
