package image

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/initramfs"
	"github.com/holdpoint/holdpoint/internal/image/kernel"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/sparse"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// Stage is an image's folder to be. Its life: NewStage makes it; the root disk
// is written into it; Fill adds the rest and makes all read-only and durable;
// Publish renames it to the build id. Until then it goes with the undo stack.
type Stage struct {
	files *durable.FS
	dir   string
	// manifest is completed by Fill.
	manifest Manifest
}

// NewStage makes a stage in the images' folder, and puts its removal on stack:
// that is not for a caller to cancel, and a leftover is Sweep's. Of m only how it
// was made is taken.
func NewStage(files *durable.FS, imagesDir string, m Manifest, stack *undo.Stack) (*Stage, error) {
	m.Architecture, m.Version = Architecture, plainVersion
	s := &Stage{files: files, dir: filepath.Join(imagesDir, buildingPrefix+durable.NewID()), manifest: m}
	if err := files.Mkdir(s.dir); err != nil {
		return nil, err
	}
	stack.Add(func() { _ = files.RemoveAll(s.dir) })
	return s, nil
}

// Dir is the folder, private to the user; what is in it when it is published,
// besides an image's files, is the caller's to remove before.
func (s *Stage) Dir() string { return s.dir }

// Root is the path that the root disk is to be written to.
func (s *Stage) Root() string { return filepath.Join(s.dir, rootFile) }

// Boot is what an image boots with besides its root disk.
type Boot struct {
	// Version is the kernel's, as uname -r says it.
	Version           string
	Kernel, Initramfs []byte
}

// NewBoot makes the initramfs of modules, which load in their order.
func NewBoot(version string, vmlinuz []byte, modules []kernel.Module) (Boot, error) {
	archive, err := initramfs.Modules(modules)
	return Boot{Version: version, Kernel: vmlinuz, Initramfs: archive}, err
}

// Boot reads what the image boots with, when Check has found it right.
func (img Image) Boot(ctx context.Context) (Boot, error) {
	if err := img.Check(ctx); err != nil {
		return Boot{}, err
	}
	vmlinuz, err := readSmall(img.Kernel(), img.Manifest.Kernel.Size)
	if err != nil {
		return Boot{}, errdefs.New(errdefs.Storage, "read image %s: %w", img.BuildID, err)
	}
	archive, err := readSmall(filepath.Join(img.Dir, initramfsFile), img.Initramfs.Size)
	if err != nil {
		return Boot{}, errdefs.New(errdefs.Storage, "read image %s: %w", img.BuildID, err)
	}
	return Boot{Version: img.KernelVersion, Kernel: vmlinuz, Initramfs: archive}, nil
}

// Fill writes what the image boots with and the manifest beside the root disk.
func (s *Stage) Fill(ctx context.Context, boot Boot, d defaults.Defaults) error {
	if s.manifest.Defaults = d; !d.IsZero() {
		s.manifest.Version = defaultsVersion
	}
	vmlinuz, archive := boot.Kernel, boot.Initramfs
	if err := s.files.WriteFile(filepath.Join(s.dir, kernelFile), vmlinuz, 0o400); err != nil {
		return err
	}
	if err := s.files.WriteFile(filepath.Join(s.dir, initramfsFile), archive, 0o400); err != nil {
		return err
	}
	known, err := s.seal(ctx, s.Root())
	if err != nil {
		return err
	}
	s.manifest.Kernel = Asset{Size: int64(len(vmlinuz)), SHA256: digestOf(vmlinuz)}
	s.manifest.Initramfs = Asset{Size: int64(len(archive)), SHA256: digestOf(archive)}
	s.manifest.KernelVersion = boot.Version
	s.manifest.CreatedAt = time.Now().UTC().Truncate(time.Second)
	s.manifest.BuildID = s.manifest.buildID()
	data, err := s.manifest.encode()
	if err != nil {
		return err
	}
	if len(data) > maxManifest {
		return errdefs.New(errdefs.Invalid, "the image's manifest would have %d bytes, at most %d are read; it has too much environment or too long a command", len(data), maxManifest)
	}
	known.BuildID = s.manifest.BuildID
	Image{Dir: s.dir}.writeVerified(known)
	return s.files.WriteFile(filepath.Join(s.dir, manifestFile), data, 0o400)
}

// seal makes the root disk sparse, read-only and durable, computes its digest,
// and returns how it looks, so that the first boot need not read it again.
func (s *Stage) seal(ctx context.Context, path string) (verified, error) {
	failed := func(err error) (verified, error) {
		return verified{}, errdefs.New(errdefs.Storage, "seal the root disk: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return failed(err)
	}
	defer f.Close()
	if err := sparse.DigHoles(ctx, f); err != nil {
		return failed(err)
	}
	if err := s.files.Chmod(path, 0o400); err != nil {
		return verified{}, err
	}
	select {
	case <-ctx.Done():
		return verified{}, ctx.Err()
	case <-time.After(settled + 10*time.Millisecond): // what only time makes true
	}
	begun := time.Now()
	sum, err := sparse.Digest(ctx, f)
	if err != nil {
		return failed(err)
	}
	seen, err := lookAt(f)
	if err != nil {
		return failed(err)
	}
	s.manifest.Root, s.manifest.DiskBytes = Asset{Size: seen.Size, SHA256: sum}, seen.Size
	if !seen.settled(begun) {
		return verified{}, nil
	}
	return verified{Version: 1, Files: map[string]looks{rootFile: seen}}, nil
}

// Publish makes the stage an image. One that is there already, as when a file
// is imported twice, is the same and stays.
func (s *Stage) Publish(ctx context.Context) (Image, error) {
	img := Image{Dir: filepath.Join(filepath.Dir(s.dir), s.manifest.BuildID), Manifest: s.manifest}
	if _, err := os.Lstat(img.Dir); !errors.Is(err, fs.ErrNotExist) {
		there, err := Open(img.Dir)
		if err == nil {
			err = there.Check(ctx)
		}
		if err != nil {
			return Image{}, err
		}
		return there, s.files.RemoveAll(s.dir)
	}
	return img, s.files.Rename(s.dir, img.Dir)
}
