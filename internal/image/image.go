// Package image builds, opens, verifies and removes what machines start
// from: a folder with a kernel, an initramfs and a root disk, identified by its
// build id. It knows folders only: which name means which build id, and who
// still needs an image, is the catalog's.
package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Architecture is the one architecture this build makes and boots images of,
// as `uname -m` calls it.
const Architecture = "x86_64"

// The files of an image's folder. All are 0400 in a folder of 0700.
const (
	kernelFile    = "kernel"
	initramfsFile = "initramfs"
	rootFile      = "root.img"
	manifestFile  = "manifest.json"
	// verifiedFile remembers what Check found; it is not part of the image.
	verifiedFile = "verified.json"
)

// Image is one image in its folder. Its life: Build, or package adopt, makes it under a
// temporary name and renames it to the build id; from then on nothing in it
// changes, Open reads its manifest, Check compares the files with it before
// every boot, BootInitramfs makes what a boot needs besides, and Remove ends it.
type Image struct {
	// Dir is the absolute path of the folder; its last element is the build id.
	Dir string
	Manifest
}

// Open reads the image in the folder dir. It looks at the manifest only; Check
// looks at the rest. NOT_FOUND: there is no image; INVALID: its manifest is
// damaged; INCOMPATIBLE: it was written by a newer holdpoint; UNSUPPORTED: it
// is of another architecture.
func Open(dir string) (Image, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Image{}, fmt.Errorf("open image %q: %w", dir, err)
	}
	data, err := readSmall(filepath.Join(dir, manifestFile), maxManifest)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Image{}, errdefs.New(errdefs.NotFound, "open image %s: there is no image; build one with holdpoint image build debian", filepath.Base(dir))
	case err != nil:
		return Image{}, errdefs.New(errdefs.Storage, "open image %s: %w", filepath.Base(dir), err)
	}
	m, err := parseManifest(data)
	if err != nil {
		return Image{}, fmt.Errorf("open image %s: %w", filepath.Base(dir), err)
	}
	if m.BuildID != filepath.Base(dir) {
		return Image{}, errdefs.New(errdefs.Invalid, "open image %s: its manifest is that of %s; remove it and build it again", filepath.Base(dir), m.BuildID)
	}
	if m.Architecture != Architecture {
		return Image{}, errdefs.New(errdefs.Unsupported, "open image %s: it is for %s and this host runs %s; build it again here", m.BuildID, m.Architecture, Architecture)
	}
	return Image{Dir: dir, Manifest: m}, nil
}

// Kernel is the path of the kernel.
func (img Image) Kernel() string { return filepath.Join(img.Dir, kernelFile) }

// Root is the path of the root disk: raw and sparse, one ext4 file system
// without a partition table. It is only ever opened read-only.
func (img Image) Root() string { return filepath.Join(img.Dir, rootFile) }

// StoredBytes is what the image takes on the host, holes not counted.
func (img Image) StoredBytes() (int64, error) {
	var sum int64
	for _, name := range []string{kernelFile, initramfsFile, rootFile} {
		info, err := os.Lstat(filepath.Join(img.Dir, name))
		if err != nil {
			return 0, errdefs.New(errdefs.Storage, "measure image %s: %w", img.BuildID, err)
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			sum += stat.Blocks * 512
		}
	}
	return sum, nil
}

// Remove removes an image from imagesDir, and from cacheDir what BootInitramfs
// made of it. Nobody may need it any more. A removal that a crash interrupts
// leaves no image, only bytes that Sweep removes. An image that is not there
// is NOT_FOUND.
func Remove(files *durable.FS, imagesDir, cacheDir, buildID string) error {
	if !buildIDPattern.MatchString(buildID) {
		return errdefs.New(errdefs.Invalid, "remove image %q: it is no build id", buildID)
	}
	doomed := filepath.Join(imagesDir, removingPrefix+buildID)
	err := files.Rename(filepath.Join(imagesDir, buildID), doomed)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.New(errdefs.NotFound, "remove image %s: there is no such image", buildID)
	case err != nil:
		return fmt.Errorf("remove image %s: %w", buildID, err)
	}
	if err := files.RemoveAll(doomed); err != nil {
		return fmt.Errorf("remove image %s: %w", buildID, err)
	}
	return removeBootFiles(files, cacheDir, buildID)
}

// The names of folders in the images' folder that are no images.
const (
	buildingPrefix = ".building-"
	removingPrefix = ".removing-"
)

// Sweep removes what builds, imports and removals that were cut off left
// behind. The caller makes sure that none is under way in this home: the daemon
// calls it when it starts.
func Sweep(ctx context.Context, cfg BuildConfig) error {
	cfg = cfg.withDefaults()
	var errs []error
	entries, err := os.ReadDir(cfg.ImagesDir)
	errs = append(errs, err)
	for _, entry := range entries {
		if name := entry.Name(); strings.HasPrefix(name, buildingPrefix) || strings.HasPrefix(name, removingPrefix) {
			errs = append(errs, cfg.FS.RemoveAll(filepath.Join(cfg.ImagesDir, name)))
		} else if entry.IsDir() { // where Verify notes what it has found
			errs = append(errs, cfg.FS.RemoveTemps(filepath.Join(cfg.ImagesDir, name)))
		}
	}
	errs = append(errs, cfg.store().Sweep(ctx))
	partial, err := os.ReadDir(bootDir(cfg.CacheDir))
	if !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	for _, entry := range partial {
		if strings.HasSuffix(entry.Name(), partialSuffix) {
			errs = append(errs, cfg.FS.Remove(filepath.Join(bootDir(cfg.CacheDir), entry.Name())))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("sweep the leftovers of image builds: %w", err)
	}
	return nil
}
