package capture

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/store"
)

// Limits on what a run may leave in a staging folder, in bytes: a set of pages
// of 64 GiB has 2 MiB, and the state of some twenty devices half of one.
const (
	maxPages   = 4 << 20
	maxDevices = 64 << 20
)

// writeBuffer is how much of a layer is written at once, in bytes.
const writeBuffer = 1 << 20

// capture has the run leave its state in the staging folder, and records the
// layers meanwhile.
func (t *taking) capture(ctx context.Context) error {
	capturing := time.Now()
	if err := t.cfg.Files.MkdirAll(t.detail.Dir); err != nil {
		return err
	}
	t.memory = t.newLayer(catalog.MemoryFormat, t.cfg.Home.MemoryLayer)
	t.memory.VirtualBytes = t.Machine.Spec.MemoryBytes
	t.devices = t.newLayer(catalog.DevicesFormat, t.cfg.Home.DeviceLayer)
	order := CaptureOrder{
		CheckpointID: t.Checkpoint.ID, ParentID: t.parentID(), Top: t.top, Dir: t.detail.Dir, StayPaused: t.StayPaused,
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() (err error) {
		t.ordered = time.Now()
		t.report, err = t.Source.Capture(ctx, order)
		return err
	})
	g.Go(func() error { return t.cfg.Catalog.AddLayers(ctx, t.Operation, t.memory, t.devices) })
	if err := g.Wait(); err != nil {
		return err
	}
	t.result.Capture = time.Since(capturing)
	t.result.Phases, t.result.Downtime = t.report.Phases, t.report.Phases.Window.Downtime
	return nil
}

// parentID is the checkpoint that chain is the memory of.
func (t *taking) parentID() string {
	if len(t.chain) == 0 {
		return ""
	}
	return t.Machine.MemoryHead
}

func (t *taking) newLayer(format string, path func(id string) string) catalog.Layer {
	id := durable.NewID()
	return catalog.Layer{
		ID: id, MachineID: t.Machine.ID, Path: filepath.ToSlash(filepath.Join("layers", filepath.Base(path(id)))),
		Format: format, State: catalog.LayerCreated, CreatedAt: time.Now(),
	}
}

// encode makes durable layers of what is staged, and seals the disk's. The
// syncs are waited for together.
func (t *taking) encode(ctx context.Context) error {
	encoding := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return t.Enter(ctx, PhaseEncode, "keeping the memory", t.detail) })
	g.Go(func() error { return t.writeMemory(ctx) })
	g.Go(func() error { return t.writeDevices(ctx) })
	g.Go(func() (err error) {
		if t.sealed, t.result.DiskBytes, err = t.seal(ctx, t.below); err == nil {
			err = t.measureDisk(ctx)
		}
		return err
	})
	if err := g.Wait(); err != nil {
		return err
	}
	if err := t.cfg.Files.SyncDir(t.cfg.Home.Layers()); err != nil {
		return err
	}
	t.result.Encode = time.Since(encoding)
	return nil
}

func (t *taking) writeMemory(ctx context.Context) error {
	pages, err := readPages(filepath.Join(t.detail.Dir, stagedPages), t.Machine.Spec.MemoryBytes)
	if err != nil {
		return err
	}
	memory, err := os.Open(filepath.Join(t.detail.Dir, stagedMemory))
	if err != nil {
		return errdefs.New(errdefs.Storage, "read captured memory: %w", err)
	}
	defer memory.Close()
	cfg := store.WriteConfig{
		ID: t.memory.ID, MemoryBytes: t.Machine.Spec.MemoryBytes, Pages: pages.Runs(), Memory: memory, Previous: t.previous,
	}
	if n := len(t.chain); n > 0 {
		cfg.Parent = t.chain[n-1].ID
	}
	return t.writeLayer(t.memory, func(w io.Writer) error {
		summary, err := store.Write(ctx, w, cfg)
		t.memory.StoredBytes, t.memory.Digest = summary.Bytes, summary.Digest.String()
		return err
	})
}

func (t *taking) writeDevices(ctx context.Context) error {
	state, err := durable.ReadSmall(filepath.Join(t.detail.Dir, stagedDevices), maxDevices)
	if err != nil {
		return err
	}
	if len(state) == 0 {
		return errdefs.New(errdefs.Internal, "the captured state of the devices is empty")
	}
	t.devices.StoredBytes, t.devices.Digest = int64(len(state)), disk.DigestOf(state)
	return t.writeLayer(t.devices, func(w io.Writer) error {
		_, err := w.Write(state)
		return err
	})
}

// writeLayer makes a layer's file at its final path, read-only, with durable
// content; its name is not durable yet.
func (t *taking) writeLayer(layer catalog.Layer, write func(io.Writer) error) error {
	file, err := t.cfg.Files.CreateExclusive(t.Path(layer), 0o400)
	if err != nil {
		return err
	}
	defer file.Close()
	buffered := bufio.NewWriterSize(file, writeBuffer)
	if err := write(buffered); err != nil {
		return err
	}
	if err := buffered.Flush(); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	return file.Close()
}

// readPages reads the set of pages that a run has staged.
func readPages(path string, memoryBytes int64) (*dirty.Set, error) {
	data, err := durable.ReadSmall(path, maxPages)
	if err != nil {
		return nil, err
	}
	pages := &dirty.Set{}
	if err := pages.UnmarshalBinary(data); err != nil {
		return nil, fmt.Errorf("read the captured pages: %w", err)
	}
	if pages.MemoryBytes() != memoryBytes {
		return nil, errdefs.New(errdefs.Internal, "the captured pages are of a memory of %d MiB, not %d",
			pages.MemoryBytes()>>20, memoryBytes>>20)
	}
	return pages, nil
}
