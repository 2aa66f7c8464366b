package script_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/cgroup"
	"github.com/holdpoint/holdpoint/internal/daemon"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/image/adopt"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakedisk"
)

// fakeHost is the daemon.Host of fake machines.
type fakeHost struct {
	machinetest.FakeOverlays
	// faults has "build-waits", which holds an image's build off as long as it
	// is there, besides the faults of machines.
	faults string
}

// PrepareBoot checks the image as the real one does.
func (fakeHost) PrepareBoot(ctx context.Context, img image.Image) (keeper.Boot, error) {
	if err := img.Check(ctx); err != nil {
		return keeper.Boot{}, err
	}
	return keeper.Boot{Kernel: img.Kernel(), Initramfs: filepath.Join(img.Dir, "initramfs"), Accelerator: "tcg"}, nil
}

// Platform is the fake hypervisor's.
func (h fakeHost) Platform(ctx context.Context, cfg machine.RunConfig) (machine.Platform, error) {
	return machinetest.NewFake(machinetest.FakeConfig{Faults: h.faults}).Platform(ctx, cfg)
}

// Merge merges layers of a fake disk.
func (fakeHost) Merge(_ context.Context, job disk.Merge) error {
	var paths []string
	for _, l := range job.Layers {
		paths = append(paths, l.Path)
	}
	return fakedisk.Merge(job.Path, paths...)
}

// BuildImage writes an image as cmdImage does.
func (h fakeHost) BuildImage(ctx context.Context, cfg image.BuildConfig, progress func(image.Progress)) (image.Image, error) {
	if cfg.Recipe != "debian" && cfg.Recipe != "" {
		return image.Image{}, errdefs.New(errdefs.Invalid, "image recipe %q: debian is the only one", cfg.Recipe)
	}
	progress(image.Progress{Phase: "installing packages", Done: 1, Total: 2})
	if err := awaitGone(ctx, filepath.Join(h.faults, "build-waits")); err != nil {
		return image.Image{}, err
	}
	m, err := writeImage(cfg.ImagesDir, strings.Join(append([]string{"debian"}, cfg.Packages...), " "), image.Architecture, defaults.Defaults{User: cfg.User})
	if err != nil {
		return image.Image{}, err
	}
	return image.Open(filepath.Join(cfg.ImagesDir, m.BuildID))
}

// ImportImage takes a file of one line, which says what the image is, for a
// disk; words after a # are the command of its machines, in a folder and with an
// environment of their own.
func (h fakeHost) ImportImage(ctx context.Context, cfg adopt.Config, progress func(image.Progress)) (image.Image, []string, error) {
	line, err := os.ReadFile(cfg.Path)
	if err != nil {
		return image.Image{}, nil, errdefs.New(errdefs.NotFound, "%w", err)
	}
	if cfg.SHA256 != "" {
		return image.Image{}, nil, errdefs.New(errdefs.Invalid, "%s: its sha256 is another", cfg.Path)
	}
	progress(image.Progress{Phase: "copying the disk", Done: 1, Total: 2})
	if err := awaitGone(ctx, filepath.Join(h.faults, "build-waits")); err != nil {
		return image.Image{}, nil, err
	}
	what, command, container := strings.Cut(strings.TrimSpace(string(line)), "#")
	var d defaults.Defaults
	if container {
		d = defaults.Defaults{Env: []string{"MADE=here"}, WorkingDir: "/tmp", Command: strings.Fields(command)}
	}
	m, err := writeImage(cfg.ImagesDir, what, image.Architecture, d)
	if err != nil {
		return image.Image{}, nil, err
	}
	img, err := image.Open(filepath.Join(cfg.ImagesDir, m.BuildID))
	return img, []string{fmt.Sprintf("kernel %q, initrd %q, partition %d, tag %q, size %d", cfg.Kernel, cfg.Initrd, cfg.Partition, cfg.Tag, cfg.DiskBytes)}, err
}

// Groups are in a hierarchy that is not there.
func (h fakeHost) Groups() *cgroup.Tree {
	return &cgroup.Tree{Mount: filepath.Join(h.faults, "groups"), Self: filepath.Join(h.faults, "group")}
}

// Checks finds nothing wrong.
func (fakeHost) Checks(context.Context) []daemon.Check {
	return []daemon.Check{{Name: "fake", State: "ok", Detail: "no real machines run here"}}
}

// awaitGone waits until there is no file at path.
func awaitGone(ctx context.Context, path string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
