package adopt

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/image/rootdisk"
	"github.com/holdpoint/holdpoint/internal/image/source"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/oci"
	"github.com/holdpoint/holdpoint/internal/oci/tree"
)

// What a disk of a container image has besides its content, in bytes: the least
// room, and an inode's share, which is mkfs.ext4's.
const (
	room     = 1 << 30
	perInode = 16 << 10
	block    = 4 << 10
	group    = 128 << 20 // mkfs.ext4 may leave out the part of one
	// spare is the space wanted besides what is known to be needed.
	spare = 128 << 20
)

// container merges the layers of a container image into a root disk.
func (cfg Config) container(ctx context.Context, path, work string, report report) (adopted, error) {
	if cfg.Partition != 0 {
		return adopted{}, errdefs.New(errdefs.Invalid, "%s: it is a container image and has no partitions; leave --partition out", cfg.Path)
	}
	boot, err := cfg.borrow(ctx)
	if err != nil {
		return adopted{}, err
	}
	before, err := cfg.verify(ctx, report)
	if err != nil {
		return adopted{}, err
	}
	files, d, err := cfg.merge(ctx, filepath.Join(work, "scratch"), report)
	if err != nil {
		return adopted{}, err
	}
	if now, err := os.Stat(cfg.Path); err != nil || !os.SameFile(now, before) || now.Size() != before.Size() || !now.ModTime().Equal(before.ModTime()) {
		return adopted{}, errdefs.New(errdefs.Conflict, "%s: it changed while it was read; import it when nothing writes to it", cfg.Path)
	}
	report("making the root disk", 0, 0)
	if err := cfg.format(ctx, files, path, filepath.Join(work, "disk")); err != nil {
		return adopted{}, fmt.Errorf("%s: %w", cfg.Path, err)
	}
	a := adopted{boot: boot, defaults: d}
	if cfg.Kernel != "" {
		report("reading the kernel", 0, 0)
		given, err := source.At(path).BootWith(ctx, cfg.Kernel, cfg.Initrd)
		if err != nil {
			return adopted{}, err
		}
		a.notes = given.Notes
		a.boot, err = image.NewBoot(given.Version, given.Image, given.Modules)
		if err != nil {
			return adopted{}, err
		}
	}
	return a, nil
}

// borrow takes the kernel of another image, unless one is given.
func (cfg Config) borrow(ctx context.Context) (image.Boot, error) {
	if cfg.Kernel != "" {
		return image.Boot{}, nil
	}
	if cfg.KernelFrom == "" {
		return image.Boot{}, errdefs.New(errdefs.NotFound, "%s: a container image has no kernel, and there is no image debian to take one from; run holdpoint image build debian, or give --kernel", cfg.Path)
	}
	img, err := image.Open(cfg.KernelFrom)
	if err != nil {
		return image.Boot{}, err
	}
	return img.Boot(ctx)
}

// verify compares a tar with its digest, if that is known, and returns how it
// looked before.
func (cfg Config) verify(ctx context.Context, report report) (os.FileInfo, error) {
	f, err := os.Open(cfg.Path)
	if err != nil {
		return nil, errdefs.New(errdefs.Invalid, "%w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || cfg.SHA256 == "" {
		return info, errdefs.As(errdefs.Storage, err)
	}
	if info.IsDir() {
		return nil, errdefs.New(errdefs.Invalid, "%s: it is a folder, which has no sha256; leave --sha256 out", cfg.Path)
	}
	return info, source.CheckSHA256(ctx, f, cfg.SHA256, "save or download it again", func(done, total int64) { report("checking the file's sha256", done, total) })
}

// merge reads all layers, and what the image says of its programs.
func (cfg Config) merge(ctx context.Context, scratch string, report report) (*tree.Tree, defaults.Defaults, error) {
	report("reading the layers", 0, 0)
	c, err := oci.Open(ctx, cfg.Path, oci.Options{Name: cfg.Tag})
	if err != nil {
		return nil, defaults.Defaults{}, err
	}
	defer c.Close()
	d := defaults.Defaults{User: c.Config.User, Env: c.Config.Env, WorkingDir: c.Config.WorkingDir, Command: c.Config.Command()}
	if err := d.Check(); err != nil {
		return nil, d, fmt.Errorf("%s: %w", cfg.Path, err)
	}
	if err := os.Mkdir(scratch, 0o700); err != nil {
		return nil, d, errdefs.New(errdefs.Storage, "keep the layers: %w", err)
	}
	if err := needSpace(scratch, c.Bytes); err != nil {
		return nil, d, err
	}
	shown := int64(-1)
	files, err := c.Merge(ctx, scratch, func(done int64) {
		if done>>20 != shown {
			shown = done >> 20
			report("reading the layers", done, c.Bytes)
		}
	})
	if err == nil {
		err = complete(files, d)
	}
	if err != nil {
		return nil, d, fmt.Errorf("%s: %w", cfg.Path, err)
	}
	return files, d, nil
}

// complete finds the user that programs are to run as, and makes the folder they
// are to run in, if it is missing, as container engines do.
func complete(files *tree.Tree, d defaults.Defaults) error {
	if _, err := files.User(d.User); err != nil {
		return errdefs.New(errdefs.Invalid, "the image's programs: %w", err)
	}
	if _, err := files.ReadFile(d.WorkingDir, 0); !errdefs.Is(err, errdefs.NotFound) {
		return nil // it is there; that it is no file is no matter
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimPrefix(d.WorkingDir, "/") + "/", Mode: 0o755})
	if err == nil {
		err = w.Close()
	}
	if err == nil {
		err = files.AddLayer(&layer, func(int64) error { return nil })
	}
	if err != nil {
		return fmt.Errorf("make the folder of the image's programs: %w", err)
	}
	return nil
}

// format makes the root disk of the tree.
func (cfg Config) format(ctx context.Context, files *tree.Tree, path, work string) error {
	var content, count int64
	err := files.Walk(func(e tree.Entry) error {
		content += ((e.Size + block - 1) &^ (block - 1)) / int64(e.Links) // each name of a file is visited
		count++
		return nil
	})
	if err != nil {
		return err
	}
	size := cfg.DiskBytes
	if size == 0 {
		size = max(content+max(content, room), 2*count*perInode)
		size = (size + group - 1) / group * group
	}
	if size > machine.MaxDisk {
		return errdefs.New(errdefs.Invalid, "it would need a disk of %d GiB, at most %d can be", size>>30, int64(machine.MaxDisk)>>30)
	}
	// mkfs.ext4 writes the inode tables before they become holes.
	if err := needSpace(filepath.Dir(work), content+size/64); err != nil {
		return err
	}
	if err := os.Mkdir(work, 0o700); err != nil {
		return errdefs.New(errdefs.Storage, "make the root disk: %w", err)
	}
	if err := rootdisk.Make(ctx, files, rootdisk.Config{Dir: work, Path: path, Bytes: size, Log: io.Discard}); err != nil {
		return err
	}
	return errdefs.As(errdefs.Storage, os.Truncate(path, size)) // a guest's file system grows into it
}

func needSpace(dir string, need int64) error {
	free, err := durable.FreeBytes(dir)
	if err != nil {
		return err
	}
	if need += spare; free < need {
		return errdefs.New(errdefs.NoSpace, "space for the container image: %d MiB are free and %d MiB are needed; free some and import again", free>>20, need>>20)
	}
	return nil
}
