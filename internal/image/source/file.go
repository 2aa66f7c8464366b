package source

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/sparse"
)

// Limits of qemu-img, which reads metadata that may be hostile.
const (
	imgMemory = 4 << 30
	imgCPU    = time.Hour
)

// file is the file that is imported, opened once: whatever its name means later,
// all is read from this one.
type file struct {
	*os.File
	path string
	// looked is how it looked before anything was read.
	looked unix.Stat_t
	// qcow2 is its header; nil for a raw disk.
	qcow2 *disk.Header
	// size is that of the disk, and stored what of it takes space, at most; both
	// in bytes.
	size, stored int64
}

// open opens the file at path and refuses what no disk can be, by its header
// alone.
func open(path string) (*file, error) {
	f, err := OpenRegular(path)
	if err != nil {
		return nil, err
	}
	opened := &file{File: f, path: path}
	if err := opened.look(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return opened, nil
}

// OpenRegular opens a file that a person named; NOT_FOUND or INVALID when it is
// none that can be read.
func OpenRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.NotFound, "%s: there is no such file", path)
	}
	if err != nil {
		return nil, errdefs.New(errdefs.Invalid, "%w", err)
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(errdefs.New(errdefs.Invalid, "%s: it is no regular file", path), err, f.Close())
	}
	return f, nil
}

func (f *file) look() error {
	if err := unix.Fstat(int(f.Fd()), &f.looked); err != nil {
		return errdefs.New(errdefs.Storage, "look at %s: %w", f.path, err)
	}
	f.size, f.stored = f.looked.Size, f.looked.Blocks*512
	var magic [8]byte
	if n, err := f.ReadAt(magic[:], 0); n < len(magic) {
		return errdefs.New(errdefs.Invalid, "%s: it is too short for a disk: %w", f.path, err)
	}
	if what := notADisk(string(magic[:])); what != "" {
		return errdefs.New(errdefs.Invalid, "%s: it is %s; give a raw or qcow2 disk", f.path, what)
	}
	if strings.HasPrefix(string(magic[:]), "QFI\xfb") {
		h, err := disk.ParseHeader(f)
		if err != nil {
			return errdefs.New(errdefs.Invalid, "%s: its qcow2 header is damaged: %w", f.path, err)
		}
		if err := h.CheckStandalone(); err != nil {
			return fmt.Errorf("%s: %w", f.path, err)
		}
		f.qcow2, f.size = &h, h.VirtualSize
	}
	if f.size > machine.MaxDisk {
		return errdefs.New(errdefs.Invalid, "%s: the disk has %d GiB, at most %d can be imported", f.path, f.size>>30, int64(machine.MaxDisk)>>30)
	}
	return nil
}

// notADisk names what begins with magic and is no disk; empty for others.
func notADisk(magic string) string {
	for prefix, what := range map[string]string{
		"\x1f\x8b": "compressed with gzip; run gunzip first", "\xfd7zXZ\x00": "compressed with xz; run unxz first",
		"\x28\xb5\x2f\xfd": "compressed with zstd; run unzstd first", "KDMV": "a VMDK disk; run qemu-img convert -O qcow2 first",
		"vhdxfile": "a VHDX disk; run qemu-img convert -O qcow2 first", "LUKS\xba\xbe": "encrypted",
	} {
		if strings.HasPrefix(magic, prefix) {
			return what
		}
	}
	return ""
}

// CheckSHA256 compares what the file holds with its digest, 64 hexadecimal digits;
// remedy is what to do about another one, which is INVALID.
func CheckSHA256(ctx context.Context, f *os.File, want, remedy string, report func(done, total int64)) error {
	info, err := f.Stat()
	if err != nil {
		return errdefs.New(errdefs.Storage, "look at %s: %w", f.Name(), err)
	}
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for done := int64(0); done < info.Size(); {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := f.ReadAt(buf, done)
		if err != nil && !errors.Is(err, io.EOF) || n == 0 {
			return errdefs.New(errdefs.Storage, "read %s: %w", f.Name(), err)
		}
		h.Write(buf[:n])
		done += int64(n)
		report(done, info.Size())
	}
	if got := hex.EncodeToString(h.Sum(nil)); !strings.EqualFold(got, want) {
		return errdefs.New(errdefs.Invalid, "%s: its sha256 is %s, not %s; %s", f.Name(), got, want, remedy)
	}
	return nil
}

// unchanged refuses a file that was written to since it was opened.
func (f *file) unchanged() error {
	var now unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &now); err != nil {
		return errdefs.New(errdefs.Storage, "look at %s: %w", f.path, err)
	}
	if now.Size != f.looked.Size || now.Mtim != f.looked.Mtim {
		return errdefs.New(errdefs.Conflict, "%s: it changed while it was read; import it when nothing writes to it", f.path)
	}
	return nil
}

// read gives a few bytes of the disk, fewer at its end.
func (f *file) read(ctx context.Context, work string, offset, n int64) ([]byte, error) {
	path := filepath.Join(work, "head")
	if err := f.copy(ctx, path, offset, min(n, f.size-offset), nil); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "read %s: %w", f.path, err)
	}
	return data, os.Remove(path)
}

// copy writes the range of the disk into the new file at path, with holes.
func (f *file) copy(ctx context.Context, path string, offset, size int64, report func(done, total int64)) error {
	if report == nil {
		report = func(int64, int64) {}
	}
	if f.qcow2 != nil {
		return f.convert(ctx, path, offset, size, report)
	}
	out, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return storage(path, err)
	}
	defer out.Close()
	reported := int64(-1)
	err = sparse.Copy(ctx, out, f.File, offset, size, func(done int64) {
		if done>>20 != reported {
			reported = done >> 20
			report(done, size)
		}
	})
	if err == nil {
		err = out.Close()
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errdefs.New(errdefs.Conflict, "%s: it became shorter while it was read", f.path)
	case err != nil:
		return storage(path, err)
	}
	return nil
}

// node is a block node for qemu-img, which reads our open file: no name is
// looked up again, and none in the header is followed.
func (f *file) node(offset, size int64) string {
	node := map[string]any{
		"driver": disk.Qcow2, "backing": nil,
		"file": map[string]any{"driver": "file", "filename": "/dev/stdin"},
	}
	if size > 0 {
		node = map[string]any{"driver": disk.Raw, "offset": offset, "size": size, "file": node}
	}
	text, _ := json.Marshal(node) // of strings and numbers it cannot fail
	return "json:" + string(text)
}

func (f *file) convert(ctx context.Context, path string, offset, size int64, report func(done, total int64)) error {
	if size < sector || offset < 0 || offset%sector != 0 || size%sector != 0 {
		return errdefs.New(errdefs.Invalid, "%s: a part of it is not in whole sectors", f.path)
	}
	_, err := f.img(ctx, size+sector, &percent{report: report, total: size}, "convert", "-p", "-O", disk.Raw, f.node(offset, size), path)
	return err
}

// measure finds out how much the qcow2 file holds, and that its tables are right.
func (f *file) measure(ctx context.Context) error {
	if f.qcow2 == nil {
		return nil
	}
	var out strings.Builder
	code, err := f.img(ctx, 0, &limited{w: &out, left: maxOutput}, "check", "--output=json", f.node(0, 0))
	if err != nil && code != 3 { // 3: clusters that nothing uses; qemu-img(1)
		return err
	}
	var found struct {
		Clusters int64 `json:"allocated-clusters"`
	}
	if err := json.Unmarshal([]byte(out.String()), &found); err != nil {
		return fmt.Errorf("read what qemu-img says of %s: %w", f.path, err)
	}
	if n := f.size >> f.qcow2.ClusterBits; found.Clusters < 0 || found.Clusters > n+1 {
		found.Clusters = n + 1
	}
	f.stored = found.Clusters << f.qcow2.ClusterBits
	return nil
}

// img runs qemu-img on the file and returns its exit code.
func (f *file) img(ctx context.Context, longest int64, out io.Writer, args ...string) (int, error) {
	if _, err := recipe.FindTool("qemu-img"); err != nil {
		return 0, errdefs.New(errdefs.Unsupported, "qemu-img is missing; run: sudo apt-get install qemu-utils")
	}
	var complaints strings.Builder
	err := recipe.Command{
		Args: append([]string{"qemu-img"}, args...), Stdin: f.File, Stdout: out, Stderr: &limited{w: &complaints, left: maxOutput},
		Limits: &recipe.Limits{Memory: imgMemory, File: longest, CPU: imgCPU},
	}.Run(ctx)
	line := lastLine(complaints.String(), "qemu-img: ")
	switch {
	case err == nil:
		return 0, nil
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case strings.Contains(line, "No space left on device"):
		return 0, errdefs.New(errdefs.NoSpace, "copy %s: no space left; free some and import again", f.path)
	}
	return exitCode(err), errdefs.New(errdefs.Invalid, "%s: qemu-img %s cannot read it: %s (%w)", f.path, args[0], line, err)
}

// percent reads what qemu-img -p prints: "    (12.34/100%)" and a return.
type percent struct {
	report func(done, total int64)
	total  int64
}

// Write implements io.Writer.
func (p *percent) Write(b []byte) (int, error) {
	text := string(b)
	if i := strings.LastIndexByte(text, '('); i >= 0 {
		number, _, _ := strings.Cut(text[i+1:], "/")
		if x, err := strconv.ParseFloat(number, 64); err == nil && x >= 0 && x <= 100 {
			p.report(int64(x/100*float64(p.total)), p.total)
		}
	}
	return len(b), nil
}
