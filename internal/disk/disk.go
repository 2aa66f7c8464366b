// Package disk makes the layers of machines' disks: it creates qcow2 overlays,
// seals them, measures them, and says to QEMU in what order they lie on each
// other. It keeps no record of layers, and it never follows a file name found
// inside one: each file of a chain is named by the caller.
package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// The formats of a layer.
const (
	Raw   = "raw"
	Qcow2 = "qcow2"
)

// clusterSize and extended L2 entries (32 subclusters of 4 KiB) were chosen by
// measuring the first random 4 KiB writes after a seal: against plain 64 KiB
// clusters twice the writes per second, and an overlay a twelfth of the size.
const clusterSize = 128 << 10

// imgTimeout bounds a qemu-img that only touches metadata.
const imgTimeout = time.Minute

// Layer is one file of a chain. Its fields are those of machine.Layer.
type Layer struct {
	ID     string
	Path   string
	Format string
}

// Merge asks for one layer in the place of several.
type Merge struct {
	// Below are the layers below them, lowest first.
	Below []Layer
	// Layers are at least two, lowest first, all qcow2.
	Layers []Layer
	// Path is the new layer's file.
	Path string
	// BytesPerSecond is how fast it may go, for one that nobody waits for; 0: as
	// fast as it can.
	BytesPerSecond int64
}

// Config is what a Disk needs.
type Config struct {
	// ImgBinary is qemu-img, as a path or a name on PATH.
	ImgBinary string
	// FS is the door through which names and modes reach the host's disk; nil is
	// the real one.
	FS *durable.FS
}

// Disk makes and measures layers. It has no end.
type Disk struct {
	img string
	fs  *durable.FS

	mu sync.Mutex
	// blanks are the empty overlays that were made, by size.
	blanks map[int64]blank
}

// New returns a Disk.
func New(cfg Config) *Disk {
	if cfg.ImgBinary == "" {
		cfg.ImgBinary = "qemu-img"
	}
	return &Disk{img: cfg.ImgBinary, fs: cfg.FS, blanks: map[int64]blank{}}
}

// Create makes an empty overlay at path, durable with its name when it
// returns. size is what the guest sees, in bytes; it may be more than what lies
// below, the rest reads as zeros. ALREADY_EXISTS when path exists; on another
// error nothing is left there.
func (d *Disk) Create(ctx context.Context, path string, size int64) error {
	if size <= 0 || size%512 != 0 {
		return errdefs.New(errdefs.Invalid, "create overlay %q: %d bytes is not a positive multiple of 512", path, size)
	}
	if _, err := os.Lstat(path); err == nil {
		return errdefs.New(errdefs.AlreadyExists, "create overlay %q: it exists", path)
	}
	f, err := d.fs.CreateExclusive(path, 0o600)
	if err != nil {
		return fmt.Errorf("create overlay: %w", err)
	}
	defer f.Close()
	if err = d.fill(ctx, f, size); err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = d.fs.SyncDir(filepath.Dir(path))
	}
	if err != nil {
		_ = os.Remove(path) // it holds nothing, and the first error says more
		return fmt.Errorf("create overlay %q: %w", path, err)
	}
	return nil
}

// fill makes the new file an empty overlay: the first one of a size by
// qemu-img, which takes 10 ms and more, the next ones as copies of that.
func (d *Disk) fill(ctx context.Context, f *durable.File, size int64) error {
	d.mu.Lock()
	made, known := d.blanks[size]
	d.mu.Unlock()
	if known {
		return made.write(f.OS())
	}
	path := f.OS().Name()
	ctx, cancel := context.WithTimeout(ctx, imgTimeout)
	defer cancel()
	_, err := d.run(ctx, "create", "-q", "-f", Qcow2,
		"-o", fmt.Sprintf("compat=1.1,lazy_refcounts=off,extended_l2=on,cluster_size=%d", clusterSize),
		path, strconv.FormatInt(size, 10))
	if err != nil {
		return err
	}
	h, err := ReadHeader(path)
	if err != nil {
		return err
	}
	if err := h.CheckStandalone(); err != nil {
		return err
	}
	if made, err = readBlank(path); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.blanks) < maxBlanks {
		d.blanks[size] = made
	}
	return nil
}

// Seal makes the overlay at path a layer: its content is durable and its mode
// forbids writing. No process may write to it any more. It returns how many
// bytes the layer takes on the host.
func (d *Disk) Seal(_ context.Context, path string) (storedBytes int64, err error) {
	if err := d.fs.Chmod(path, 0o400); err != nil {
		return 0, fmt.Errorf("seal layer: %w", err)
	}
	return Allocated(path)
}

// CheckFile refuses a file that is no overlay of ours by its header: not a
// regular file, not qcow2, or one that names other files.
func (d *Disk) CheckFile(path string) error {
	h, err := ReadHeader(path)
	if err != nil {
		return err
	}
	return h.CheckStandalone()
}

// VirtualSize is the size of the disk that l shows, in bytes.
func VirtualSize(l Layer) (int64, error) {
	switch l.Format {
	case Qcow2:
		h, err := ReadHeader(l.Path)
		if err != nil {
			return 0, err
		}
		return h.VirtualSize, nil
	case Raw:
		st, err := os.Stat(l.Path)
		if err != nil {
			return 0, missing(l.Path, err)
		}
		return st.Size(), nil
	}
	return 0, errdefs.New(errdefs.Invalid, "layer %s: unknown format %q", l.ID, l.Format)
}

// Check verifies the metadata of every qcow2 file of the chain and fails on
// damage. Clusters that nothing uses, as a power cut leaves them, are no
// damage. The chain must not be in use by a writer.
func (d *Disk) Check(ctx context.Context, chain []Layer) error {
	for i, l := range chain {
		if l.Format != Qcow2 {
			continue
		}
		opts, err := ChainJSON(chain[:i+1], false)
		if err != nil {
			return err
		}
		// Exit 3 is leaked clusters only; see qemu-img(1).
		if _, err := d.run(ctx, "check", "-q", "json:"+string(opts)); err != nil && exitCode(err) != 3 {
			return errdefs.New(errdefs.Storage, "check layer %s: %w", l.ID, err)
		}
	}
	return nil
}

// exitCode is that of the process in err's chain; -1 for none.
func exitCode(err error) int {
	var e *exec.ExitError
	if errors.As(err, &e) {
		return e.ExitCode()
	}
	return -1
}

// run runs qemu-img; on failure the last line it printed is in the error.
func (d *Disk) run(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, d.img, args...)
	cmd.WaitDelay = 5 * time.Second
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	switch {
	case err == nil:
		return out, nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("run qemu-img %s: %w", args[0], ctx.Err())
	case cmd.ProcessState == nil:
		return nil, errdefs.New(errdefs.Unsupported, "run qemu-img: %w; install the package qemu-utils (apt install qemu-system-x86 qemu-utils)", err)
	}
	line := strings.TrimSpace(stderr.String())
	line = strings.TrimPrefix(line[strings.LastIndexByte(line, '\n')+1:], "qemu-img: ")
	if strings.Contains(line, "No space left on device") {
		return nil, errdefs.New(errdefs.NoSpace, "run qemu-img %s: %s: %w", args[0], line, err)
	}
	return nil, fmt.Errorf("run qemu-img %s: %s: %w", args[0], line, err)
}

func missing(path string, err error) error {
	if os.IsNotExist(err) {
		return errdefs.New(errdefs.NotFound, "read layer %q: %w", path, err)
	}
	return errdefs.New(errdefs.Storage, "read layer %q: %w", path, err)
}
