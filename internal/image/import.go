package image

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"runtime/debug"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/source"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// Imported is the recipe of an image whose disk somebody else made.
const Imported = "import"

// ImportConfig says what to import, and where to.
type ImportConfig struct {
	// FS writes what is to stay; nil for the real one.
	FS *durable.FS
	// ImagesDir gets the image's folder. It exists, private to the user.
	ImagesDir string
	// Path is the file with the disk: raw or qcow2, an ext4 file system or a
	// GUID partition table with one as the root. Kernel and Initrd are a kernel,
	// and an initial RAM disk with its modules; without a kernel the disk's own
	// is taken. All are absolute; only Path must be there.
	Path, Kernel, Initrd string
	// SHA256 is that of the file, 64 hexadecimal digits; empty if not known.
	SHA256 string
	// Partition is the number of the root's partition, 0 to find it.
	Partition int
}

var givenDigest = regexp.MustCompile(`^[0-9A-Fa-f]{64}$`)

func (cfg ImportConfig) check() error {
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
	case cfg.Initrd != "" && cfg.Kernel == "":
		return errdefs.New(errdefs.Invalid, "initrd %s: it goes with a kernel; give --kernel too", cfg.Initrd)
	}
	return nil
}

// Import makes an image of a disk that somebody else made and returns it,
// durable, in its folder, with what a person should know of it. progress is
// called from one goroutine at a time, until Import returns. When it fails, or
// ctx ends, nothing is left; the file is never written to. What the file must be
// is told at source.Extract, what its kernel must have at kernel.Modules. The
// same disk imported again is the same image.
func Import(ctx context.Context, cfg ImportConfig, progress func(Progress)) (Image, []string, error) {
	err := cfg.check()
	if err == nil {
		err = source.Missing()
	}
	if err != nil {
		return Image{}, nil, fmt.Errorf("import image: %w", err)
	}
	// Kernels and modules are read whole.
	defer debug.FreeOSMemory()
	img, notes, err := cfg.run(ctx, func(phase string, done, total int64) {
		if progress != nil {
			progress(Progress{Phase: phase, Done: done, Total: total})
		}
	})
	if err != nil {
		return Image{}, nil, fmt.Errorf("import image: %w", err)
	}
	return img, notes, nil
}

// run makes the folder step by step, the root disk first.
func (cfg ImportConfig) run(ctx context.Context, report func(phase string, done, total int64)) (Image, []string, error) {
	var stack undo.Stack
	defer stack.Run()
	s, err := newStage(cfg.FS, cfg.ImagesDir, Manifest{
		Version: manifestVersion, Architecture: Architecture, Recipe: Imported, Packages: []string{},
	}, &stack)
	if err != nil {
		return Image{}, nil, err
	}
	work := filepath.Join(s.dir, "work")
	if err := cfg.FS.Mkdir(work); err != nil {
		return Image{}, nil, err
	}
	root, err := source.Extract(ctx, source.Config{
		Path: cfg.Path, SHA256: cfg.SHA256, Partition: cfg.Partition, Work: work, Report: report,
	})
	if err != nil {
		return Image{}, nil, err
	}
	report("reading the kernel", 0, 0)
	boot, err := cfg.boot(ctx, root)
	if err != nil {
		return Image{}, nil, err
	}
	if err := cfg.FS.Rename(root.Path, filepath.Join(s.dir, rootFile)); err != nil {
		return Image{}, nil, err
	}
	if err := cfg.FS.RemoveAll(work); err != nil {
		return Image{}, nil, err
	}
	report("computing digests", 0, 0)
	if err := s.fill(ctx, boot.Version, boot.Image, boot.Modules); err != nil {
		return Image{}, nil, err
	}
	img, err := s.publish(ctx)
	if err != nil {
		return Image{}, nil, err
	}
	stack.Release()
	return img, append(root.Notes, boot.Notes...), nil
}

// boot takes the kernel that was given, or the disk's own.
func (cfg ImportConfig) boot(ctx context.Context, root source.Root) (source.Boot, error) {
	if cfg.Kernel != "" {
		return root.BootWith(ctx, cfg.Kernel, cfg.Initrd)
	}
	boot, err := root.Boot(ctx)
	if err != nil {
		return boot, fmt.Errorf("%s: %w", cfg.Path, err)
	}
	return boot, nil
}
