// Package capture takes checkpoints: it seals what a machine's disk has become,
// gives the machine a new top to write to, and publishes the record. When and
// of what a checkpoint is taken, who may not act meanwhile, and how a machine
// is stopped and booted is its caller's.
package capture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/sparse"
)

// minFree is what must be free in the home before anything is stopped, in
// bytes: an empty overlay and the catalog's log take about 1 MiB, the rest is
// for what the guest writes before somebody reads a warning.
const minFree = 64 << 20

// Overlays makes the files that a guest writes to.
type Overlays interface {
	// Create makes an empty overlay of the virtual size at path, which does
	// not exist, and syncs it. It names no backing file.
	Create(ctx context.Context, path string, virtualBytes int64) error
	// Seal makes the overlay at path read-only for good, synced, and returns
	// what it takes on the host, in bytes. Sealing twice changes nothing.
	Seal(ctx context.Context, path string) (storedBytes int64, err error)
	// CheckFile refuses (STORAGE) a file that cannot be an overlay or layer.
	CheckFile(path string) error
}

// Config is what a Capturer works with.
type Config struct {
	Catalog  *catalog.Catalog
	Files    *durable.FS
	Home     *home.Home
	Overlays Overlays
	// Memory is for full checkpoints.
	Memory Memory
	// Trust names (STORAGE) the first of the layers that is known to be damaged;
	// nil trusts all.
	Trust func(ctx context.Context, layers ...string) error
}

// Capturer takes checkpoints.
type Capturer struct{ cfg Config }

// New returns a Capturer.
func New(cfg Config) *Capturer { return &Capturer{cfg: cfg} }

// NewLayer makes an empty overlay at its final path, for nobody yet. The
// caller records it, or removes it with RemoveFile.
func (c *Capturer) NewLayer(ctx context.Context, machineID string, virtualBytes int64) (catalog.Layer, error) {
	if err := c.CheckSpace(); err != nil {
		return catalog.Layer{}, err
	}
	id := durable.NewID()
	path := c.cfg.Home.Layer(id)
	if err := c.cfg.Overlays.Create(ctx, path, virtualBytes); err != nil {
		c.RemoveFile(path)
		return catalog.Layer{}, err // it names the overlay
	}
	relative, err := filepath.Rel(c.cfg.Home.Dir(), path)
	if err != nil {
		return catalog.Layer{}, fmt.Errorf("name overlay %s: %w", path, err)
	}
	return catalog.Layer{
		ID: id, MachineID: machineID, Path: filepath.ToSlash(relative), Format: "qcow2",
		VirtualBytes: virtualBytes, State: catalog.LayerCreated, CreatedAt: time.Now(),
	}, nil
}

// CheckSpace refuses with NO_SPACE when the home has too little room left to
// begin anything.
func (c *Capturer) CheckSpace() error { return c.checkRoom(minFree) }

func (c *Capturer) checkRoom(needed int64) error {
	free, err := durable.FreeBytes(c.cfg.Home.Layers())
	if err != nil {
		return err
	}
	if free < needed {
		return errdefs.New(errdefs.NoSpace, "%s has %d MiB free, %d MiB are needed; free some space or remove checkpoints",
			c.cfg.Home.Dir(), free>>20, needed>>20)
	}
	return nil
}

// Path is where a layer is on the host.
func (c *Capturer) Path(l catalog.Layer) string {
	return filepath.Join(c.cfg.Home.Dir(), filepath.FromSlash(l.Path))
}

// RemoveFile removes the file of a layer that nothing has recorded. What
// remains is found by the next sweep of unknown files.
func (c *Capturer) RemoveFile(path string) {
	_ = c.cfg.Files.Remove(path) // see above
}

// Prepare makes the next overlay and records it as the top of the machine's
// chain, for the next run to write to; the present one goes on with its own.
func (c *Capturer) Prepare(ctx context.Context, m catalog.Machine) (catalog.Layer, error) {
	layer, err := c.NewLayer(ctx, m.ID, m.Spec.DiskBytes)
	if err != nil {
		return catalog.Layer{}, err
	}
	if err := c.cfg.Catalog.AddOverlay(ctx, m.ID, layer); err != nil {
		c.RemoveFile(c.Path(layer))
		return catalog.Layer{}, err
	}
	return layer, nil
}

// Discard takes back what Prepare did, as long as no run has begun with it.
func (c *Capturer) Discard(ctx context.Context, machineID, layerID string) error {
	chain, err := c.cfg.Catalog.Chain(ctx, machineID)
	if err != nil {
		return err
	}
	if len(chain) == 0 || chain[len(chain)-1].ID != layerID || chain[len(chain)-1].State != catalog.LayerCreated {
		return nil
	}
	if err := c.cfg.Catalog.DropTop(ctx, machineID, layerID); err != nil {
		return err
	}
	return c.Sweep(ctx)
}

// DiscardUnused is Discard of whatever top no run has begun with.
func (c *Capturer) DiscardUnused(ctx context.Context, machineID string) error {
	chain, err := c.cfg.Catalog.Chain(ctx, machineID)
	if err != nil || len(chain) < 2 {
		return err
	}
	return c.Discard(ctx, machineID, chain[len(chain)-1].ID)
}

// Sweep removes the layers nothing needs any more.
func (c *Capturer) Sweep(ctx context.Context) error {
	layers, err := c.cfg.Catalog.UnreferencedLayers(ctx)
	if err != nil || len(layers) == 0 {
		return err
	}
	ids := make([]string, len(layers))
	for i, layer := range layers {
		if err := c.cfg.Files.Remove(c.Path(layer)); err != nil {
			return err
		}
		ids[i] = layer.ID
	}
	return c.cfg.Catalog.DeleteLayers(ctx, ids...)
}

// CheckLayers refuses (STORAGE) layers whose files are missing or damaged as
// far as a look at each tells, before anything is stopped for them. what names
// whose they are.
func (c *Capturer) CheckLayers(layers []catalog.Layer, what string) error {
	for _, layer := range layers {
		path := c.Path(layer)
		info, err := os.Lstat(path)
		length := layer.StoredBytes
		if layer.Format == catalog.RawFormat {
			length = layer.VirtualBytes
		}
		if err == nil && length != 0 && info.Size() != length {
			err = fmt.Errorf("it has %d bytes, not %d", info.Size(), length)
		}
		noun := "disk"
		switch {
		case layer.Format == catalog.MemoryFormat || layer.Format == catalog.DevicesFormat:
			noun = layer.Format
		case layer.Format == catalog.RawFormat: // any bytes may be a raw disk
		case err == nil:
			err = c.cfg.Overlays.CheckFile(path)
		}
		if err != nil {
			return errdefs.New(errdefs.Storage, "%s: its %s layer %s is damaged (%w); choose another checkpoint", what, noun, layer.ID, err)
		}
	}
	return nil
}

// How large a disk layer may be, in bytes, whose digest is computed before its
// checkpoint is published, beside its memory, and before its operation ends. That
// of a larger one is left to Sign: it takes a second for each GiB.
const (
	digestBefore = 8 << 20
	digestAfter  = 64 << 20
)

// measure is what a layer takes, and its digest if it is not larger than most.
func (c *Capturer) measure(ctx context.Context, layer catalog.Layer, most int64) (m catalog.Measured, err error) {
	path := c.Path(layer)
	size, find := fileSize, disk.Digest
	if layer.Format == catalog.RawFormat {
		size, find = disk.Allocated, sparse.DigestFile
	}
	m = catalog.Measured{ID: layer.ID, Digest: layer.Digest}
	if m.Bytes, err = size(path); err != nil {
		return m, errdefs.New(errdefs.Storage, "measure layer %s: %w", layer.ID, err)
	}
	if m.Digest == "" && m.Bytes <= most {
		if m.Digest, _, err = find(ctx, path); err != nil {
			return m, fmt.Errorf("measure layer %s: %w", layer.ID, err)
		}
	}
	return m, nil
}

func fileSize(path string) (int64, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// Sign records the digests of the disks' layers that checkpoints have and that
// have none yet, so that a checkpoint is proven against what its disk was, not
// what it has become. Other layers may be written to still, also sealed ones,
// while nobody knows whether a run has switched to the one above. Of a layer that
// cannot be read the error tells, after the others.
func (c *Capturer) Sign(ctx context.Context) error {
	layers, err := c.cfg.Catalog.UnsignedLayers(ctx)
	for _, layer := range layers {
		m, failed := c.measure(ctx, layer, math.MaxInt64)
		if failed == nil {
			failed = c.cfg.Catalog.MeasureLayers(ctx, m)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		err = errors.Join(err, failed)
	}
	return err
}

// Settle does what a publication leaves for when the machine is back: it
// records what the sealed layers take, for CheckLayers, and their digests.
func (c *Capturer) Settle(ctx context.Context, k checkpoint.Checkpoint) error {
	ids := k.Layers
	if k.Full != nil {
		ids = slices.Concat(k.Layers, k.Full.Memory, []string{k.Full.Devices})
	}
	layers, err := c.cfg.Catalog.GetLayers(ctx, ids...)
	if err != nil {
		return err
	}
	var measured []catalog.Measured
	for _, layer := range layers {
		if layer.StoredBytes != 0 && (layer.Digest != "" || layer.StoredBytes > digestAfter) {
			continue
		}
		if m, err := c.measure(ctx, layer, digestAfter); err == nil { // else CheckLayers will say so
			measured = append(measured, m)
		}
	}
	if len(measured) == 0 {
		return nil
	}
	return c.cfg.Catalog.MeasureLayers(ctx, measured...)
}

// Publish seals what lies below the machine's top and publishes it as a
// checkpoint; the top must have been prepared and never written to. Of ckpt
// the caller fills in id, name, kind, consistency, message, routes and origin.
func (c *Capturer) Publish(ctx context.Context, m catalog.Machine, ckpt checkpoint.Checkpoint) (checkpoint.Checkpoint, error) {
	chain, err := c.cfg.Catalog.Chain(ctx, m.ID)
	if err != nil {
		return ckpt, err
	}
	if len(chain) < 2 {
		return ckpt, errdefs.New(errdefs.Internal, "publish checkpoint of %s: its chain has %d layers, no top was prepared", m.Name, len(chain))
	}
	below := chain[:len(chain)-1]
	sealed, bytes, err := c.seal(ctx, below)
	if err != nil {
		return ckpt, err
	}
	ckpt.DiskBytes = bytes
	for _, layer := range below {
		ckpt.Layers = append(ckpt.Layers, layer.ID)
	}
	return c.publish(ctx, m, ckpt, sealed)
}

// publish completes the record of a disk checkpoint and commits it.
func (c *Capturer) publish(ctx context.Context, m catalog.Machine, ckpt checkpoint.Checkpoint, sealed []string) (_ checkpoint.Checkpoint, err error) {
	ckpt.MachineID, ckpt.Parent, ckpt.ImageBuildID, ckpt.CreatedAt = m.ID, m.Head, m.ImageBuildID, time.Now()
	if ckpt.Spec, err = encodeSpec(m.Spec); err != nil {
		return ckpt, err
	}
	if err := c.cfg.Catalog.PublishCheckpoint(ctx, ckpt, sealed); err != nil {
		return ckpt, err
	}
	return ckpt, nil
}

// seal seals what is not sealed yet of the layers, none of which a run writes
// to any more, and returns the ids of these and what they take on the host.
func (c *Capturer) seal(ctx context.Context, layers []catalog.Layer) (sealed []string, bytes int64, err error) {
	for _, layer := range layers {
		if layer.State == catalog.LayerSealed {
			continue
		}
		stored, err := c.cfg.Overlays.Seal(ctx, c.Path(layer))
		if err != nil {
			return nil, 0, fmt.Errorf("seal layer %s: %w", layer.ID, err)
		}
		sealed = append(sealed, layer.ID)
		bytes += stored
	}
	return sealed, bytes, nil
}

func encodeSpec(spec machine.Spec) ([]byte, error) {
	encoded, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encode spec: %w", err)
	}
	return encoded, nil
}
