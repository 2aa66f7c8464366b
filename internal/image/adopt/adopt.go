// Package adopt makes images of what somebody else made: a disk, or a container
// image. What it is given is recognized by its content, may be hostile, and is
// only read; nothing in it is run.
package adopt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/image/source"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// The recipes of images of a disk and of a container image.
const (
	Disk      = "import"
	Container = "import-container"
)

// Config says what to import, and where to.
type Config struct {
	// FS writes what is to stay; nil for the real one.
	FS *durable.FS
	// ImagesDir gets the image's folder. It exists, private to the user.
	ImagesDir string
	// Path is a file with a disk: raw or qcow2, an ext4 file system or a GUID
	// partition table with one as the root; or a container image: a folder or a
	// tar. Kernel and Initrd are a kernel, and an initial RAM disk with its
	// modules; without a kernel a disk's own is taken. All are absolute; only Path
	// must be there.
	Path, Kernel, Initrd string
	// KernelFrom is the folder of the image whose kernel a container image gets
	// where no other is given; empty for none.
	KernelFrom string
	// SHA256 is that of the file, 64 hexadecimal digits; empty if not known.
	SHA256 string
	// Partition is the number of a disk's root partition, 0 to find it.
	Partition int
	// Tag chooses between several container images; DiskBytes is the size of the
	// disk that one gets, whole MiB, 0 for what it holds and as much room again.
	Tag       string
	DiskBytes int64
}

var givenDigest = regexp.MustCompile(`^[0-9A-Fa-f]{64}$`)

func (cfg Config) check() error {
	for _, path := range []string{cfg.Path, cfg.Kernel, cfg.Initrd} {
		if path != "" && !filepath.IsAbs(path) || cfg.Path == "" {
			return errdefs.New(errdefs.Invalid, "file %q: give its absolute path", path)
		}
	}
	switch {
	case cfg.SHA256 != "" && !givenDigest.MatchString(cfg.SHA256):
		return errdefs.New(errdefs.Invalid, "sha256 %q: give 64 hexadecimal digits", cfg.SHA256)
	case cfg.Partition < 0:
		return errdefs.New(errdefs.Invalid, "partition %d: give its number, from 1", cfg.Partition)
	case cfg.DiskBytes != 0 && (cfg.DiskBytes < image.MinDisk || cfg.DiskBytes > machine.MaxDisk || cfg.DiskBytes%(1<<20) != 0):
		return errdefs.New(errdefs.Invalid, "disk size %d: give whole MiB from %d GiB to %d GiB", cfg.DiskBytes, image.MinDisk>>30, int64(machine.MaxDisk)>>30)
	case cfg.Initrd != "" && cfg.Kernel == "":
		return errdefs.New(errdefs.Invalid, "initrd %s: it goes with a kernel; give --kernel too", cfg.Initrd)
	}
	return nil
}

// Import makes an image and returns it, durable, in its folder, with what a
// person should know of it. progress is called from one goroutine at a time,
// until Import returns. When it fails, or ctx ends, nothing is left; what is
// imported is never written to. What a disk must be is told at source.Extract, a
// container image at oci.Open, and what a kernel must have at kernel.Modules. The
// same disk imported again is the same image.
func Import(ctx context.Context, cfg Config, progress func(image.Progress)) (image.Image, []string, error) {
	err := cfg.check()
	if err == nil {
		err = source.Missing()
	}
	if err != nil {
		return image.Image{}, nil, fmt.Errorf("import image: %w", err)
	}
	// Kernels and modules are read whole.
	defer debug.FreeOSMemory()
	img, notes, err := cfg.run(ctx, func(phase string, done, total int64) {
		if progress != nil {
			progress(image.Progress{Phase: phase, Done: done, Total: total})
		}
	})
	if err != nil {
		return image.Image{}, nil, fmt.Errorf("import image: %w", err)
	}
	return img, notes, nil
}

// report is told how far a phase is, in bytes; total 0 is unknown.
type report func(phase string, done, total int64)

// adopted is what an image is made of besides the root disk, which is in the
// stage.
type adopted struct {
	boot     image.Boot
	defaults defaults.Defaults
	notes    []string
}

// run makes the folder step by step, the root disk first.
func (cfg Config) run(ctx context.Context, report report) (image.Image, []string, error) {
	made, recipe := cfg.disk, Disk
	container, err := cfg.isContainer()
	if err != nil {
		return image.Image{}, nil, err
	}
	if container {
		made, recipe = cfg.container, Container
	}
	var stack undo.Stack
	defer stack.Run()
	s, err := image.NewStage(cfg.FS, cfg.ImagesDir, image.Manifest{Recipe: recipe, Packages: []string{}}, &stack)
	if err != nil {
		return image.Image{}, nil, err
	}
	work := filepath.Join(s.Dir(), "work")
	if err := cfg.FS.Mkdir(work); err != nil {
		return image.Image{}, nil, err
	}
	a, err := made(ctx, s.Root(), work, report)
	if err != nil {
		return image.Image{}, nil, err
	}
	if err := cfg.FS.RemoveAll(work); err != nil {
		return image.Image{}, nil, err
	}
	report("computing digests", 0, 0)
	if err := s.Fill(ctx, a.boot, a.defaults); err != nil {
		return image.Image{}, nil, err
	}
	img, err := s.Publish(ctx)
	if err != nil {
		return image.Image{}, nil, err
	}
	stack.Release()
	return img, a.notes, nil
}

// isContainer looks at what there is: a folder, or a file that begins as tars do.
func (cfg Config) isContainer() (bool, error) {
	f, err := os.OpenFile(cfg.Path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, errdefs.New(errdefs.NotFound, "%s: there is no such file", cfg.Path)
	case err != nil:
		return false, errdefs.New(errdefs.Invalid, "%w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return false, errdefs.New(errdefs.Storage, "look at %s: %w", cfg.Path, err)
	}
	if info.IsDir() {
		return true, nil
	}
	const magicAt = 257 // pax(1), "ustar Interchange Format"
	magic := make([]byte, 5)
	_, err = f.ReadAt(magic, magicAt)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, errdefs.New(errdefs.Invalid, "%s: it is no regular file: %w", cfg.Path, err)
	}
	return string(magic) == "ustar", nil
}

// disk takes the root and the kernel out of a disk.
func (cfg Config) disk(ctx context.Context, path, work string, report report) (adopted, error) {
	if cfg.Tag != "" || cfg.DiskBytes != 0 {
		return adopted{}, errdefs.New(errdefs.Invalid, "%s: it is no container image; leave --tag and --size out", cfg.Path)
	}
	root, err := source.Extract(ctx, source.Config{
		Path: cfg.Path, SHA256: cfg.SHA256, Partition: cfg.Partition, Work: work, Report: report,
	})
	if err != nil {
		return adopted{}, err
	}
	report("reading the kernel", 0, 0)
	var boot source.Boot
	if cfg.Kernel != "" {
		boot, err = root.BootWith(ctx, cfg.Kernel, cfg.Initrd)
	} else if boot, err = root.Boot(ctx); err != nil {
		err = fmt.Errorf("%s: %w", cfg.Path, err)
	}
	if err != nil {
		return adopted{}, err
	}
	if err := cfg.FS.Rename(root.Path, path); err != nil {
		return adopted{}, err
	}
	made, err := image.NewBoot(boot.Version, boot.Image, boot.Modules)
	return adopted{boot: made, notes: append(root.Notes, boot.Notes...)}, err
}
