package capture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/sparse"
)

// The modes of a raw disk that a run writes to, and of one that was kept.
const (
	liveMode = 0o600
	keptMode = 0o400
)

// CheckCopies refuses with NO_SPACE when the home has too little room for count
// copies of the raw disk at path. A clone takes none.
func (c *Capturer) CheckCopies(path string, count int) error {
	from, err := os.Open(path)
	if err != nil {
		return errdefs.New(errdefs.Storage, "look at raw disk %q: %w", path, err)
	}
	defer from.Close()
	each, err := sparse.CopyBytes(from, c.cfg.Home.Layers())
	if err != nil {
		return fmt.Errorf("look at raw disk %q: %w", path, err)
	}
	return c.checkRoom(minFree + int64(count)*each)
}

// CopyDisk makes a raw disk of the machine of the one at path, for nobody yet and
// of at least the virtual size. The caller records it, or removes it with
// RemoveFile. progress is told of bytes of data.
func (c *Capturer) CopyDisk(ctx context.Context, machineID, path string, virtualBytes int64, progress func(done, total int64)) (catalog.Layer, error) {
	layer, _, err := c.copyDisk(ctx, machineID, path, virtualBytes, liveMode, progress)
	return layer, err
}

func (c *Capturer) copyDisk(ctx context.Context, machineID, path string, virtualBytes int64, mode os.FileMode, progress func(done, total int64)) (catalog.Layer, sparse.Way, error) {
	if err := c.CheckCopies(path, 1); err != nil {
		return catalog.Layer{}, "", err
	}
	id := durable.NewID()
	to := c.cfg.Home.RawLayer(id)
	way, err := c.copyFile(ctx, to, path, virtualBytes, mode, progress)
	if err != nil {
		c.RemoveFile(to)
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return catalog.Layer{}, "", fmt.Errorf("copy raw disk %q: %w", path, err)
	}
	relative, err := filepath.Rel(c.cfg.Home.Dir(), to)
	if err != nil {
		return catalog.Layer{}, "", fmt.Errorf("name raw disk %s: %w", to, err)
	}
	return catalog.Layer{
		ID: id, MachineID: machineID, Path: filepath.ToSlash(relative), Format: catalog.RawFormat,
		VirtualBytes: virtualBytes, State: catalog.LayerCreated, CreatedAt: time.Now(),
	}, way, nil
}

// copyFile makes the file and syncs it, with its name.
func (c *Capturer) copyFile(ctx context.Context, to, path string, size int64, mode os.FileMode, progress func(done, total int64)) (way sparse.Way, err error) {
	from, err := os.Open(path)
	if err != nil {
		return "", errdefs.New(errdefs.Storage, "open it: %w", err)
	}
	defer from.Close()
	f, err := c.cfg.Files.CreateExclusive(to, mode)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if way, err = sparse.CopyFile(ctx, f.OS(), from, progress); err != nil {
		return "", err
	}
	if info, err := f.OS().Stat(); err != nil || info.Size() < size {
		if err = errors.Join(err, f.OS().Truncate(size)); err != nil {
			return "", errdefs.New(errdefs.Storage, "make its copy longer: %w", err)
		}
	}
	if err := f.Sync(); err != nil {
		return "", err
	}
	return way, c.cfg.Files.SyncDir(filepath.Dir(to))
}

// RawRequest asks for a checkpoint of a raw disk that no guest writes to now.
type RawRequest struct {
	// Operation keeps the copy until the checkpoint is published.
	Operation string
	Machine   catalog.Machine
	// Checkpoint is as of Publish.
	Checkpoint checkpoint.Checkpoint
	Progress   func(done, total int64)
}

// PublishCopy keeps a copy of a raw disk and publishes it as a checkpoint. On
// error nothing is published, and what is left goes with the operation.
func (c *Capturer) PublishCopy(ctx context.Context, r RawRequest) (checkpoint.Checkpoint, sparse.Way, error) {
	ckpt, m := r.Checkpoint, r.Machine
	live, err := c.rawDisk(ctx, m)
	if err != nil {
		return ckpt, "", err
	}
	layer, way, err := c.copyDisk(ctx, m.ID, c.Path(live), live.VirtualBytes, keptMode, r.Progress)
	if err != nil {
		return ckpt, "", err
	}
	if err := c.cfg.Catalog.AddLayer(ctx, r.Operation, layer); err != nil {
		c.RemoveFile(c.Path(layer))
		return ckpt, "", err
	}
	ckpt.Layers = []string{layer.ID}
	if ckpt.DiskBytes, err = disk.Allocated(c.Path(layer)); err != nil {
		return ckpt, "", err
	}
	ckpt, err = c.publish(ctx, m, ckpt, ckpt.Layers)
	return ckpt, way, err
}

// rawDisk is the one layer of a machine with a raw disk.
func (c *Capturer) rawDisk(ctx context.Context, m catalog.Machine) (catalog.Layer, error) {
	chain, err := c.cfg.Catalog.Chain(ctx, m.ID)
	if err != nil {
		return catalog.Layer{}, err
	}
	if len(chain) != 1 || chain[0].Format != catalog.RawFormat {
		return catalog.Layer{}, errdefs.New(errdefs.Internal, "look at the raw disk of %s: it has %d layers", m.Name, len(chain))
	}
	return chain[0], nil
}

// CheckRoom refuses with NO_SPACE, before anything is stopped for it, when there
// is too little room to keep the machine's disk.
func (c *Capturer) CheckRoom(ctx context.Context, m catalog.Machine) error {
	if !m.Spec.Raw() {
		return c.CheckSpace()
	}
	live, err := c.rawDisk(ctx, m)
	if err != nil {
		return err
	}
	return c.CheckCopies(c.Path(live), 1)
}
