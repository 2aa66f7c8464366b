package restore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/memory"
)

// MemoryFiles makes the memory of full checkpoints files that runs can map
// (package memory).
type MemoryFiles interface {
	// Open gives the memory file of a full checkpoint, made if there is none.
	// It stays until release is called; from then on the catalog says whether
	// a run maps it.
	Open(ctx context.Context, k checkpoint.Checkpoint) (file memory.File, release func(), err error)
	// Check removes a memory file that is not what its layers say.
	Check(ctx context.Context, k checkpoint.Checkpoint) (removed bool, err error)
}

// start is all that a run begins from. It is prepared before anything is
// stopped for it, and released when the run is recorded or given up.
type start struct {
	launch Launch
	from   string
	// release lets go of the memory file.
	release func()
}

// want is what a start is made for.
type want struct {
	operation string
	machine   catalog.Machine
	target    checkpoint.Checkpoint
	host      Host
	// destination begins the run.
	destination Destination
	// boot: the disk alone is wanted.
	boot, asIs bool
	// noStandby: one has failed already.
	noStandby bool
	// restoreDisk is the command for the checkpoint's disk alone.
	restoreDisk string
	// progress is told how far the copy of a raw disk is.
	progress func(done, total int64)
}

// checkFull refuses a checkpoint that cannot be continued, before any effect.
func (r *Restorer) checkFull(ctx context.Context, w want) error {
	k := w.target
	if k.Kind != checkpoint.Full || k.Full == nil {
		return errdefs.New(errdefs.KindMismatch, "checkpoint %s is a disk checkpoint, it has no memory to continue; its disk: %s", label(k), w.restoreDisk)
	}
	layers, err := r.cfg.Catalog.GetLayers(ctx, append(append([]string{}, k.Full.Memory...), k.Full.Devices)...)
	if err != nil {
		return err
	}
	if err := r.cfg.Capturer.CheckLayers(layers, "checkpoint "+label(k)); err != nil {
		return err
	}
	var then machine.Platform
	if err := json.Unmarshal(k.Full.Platform, &then); err != nil {
		return errdefs.New(errdefs.Storage, "read platform of checkpoint %s: %w", k.ID, err)
	}
	here, err := w.host.Platform(ctx, w.machine)
	if err != nil {
		return err
	}
	return then.Check(here, "checkpoint "+label(k), w.restoreDisk)
}

// prepare makes ready what a run of the target begins from: a standby if there
// is one, else a memory file and a fresh top, staged under the operation's lease.
func (r *Restorer) prepare(ctx context.Context, w want) (_ *start, err error) {
	chain, err := r.cfg.Catalog.GetLayers(ctx, w.target.Layers...)
	if err != nil {
		return nil, err
	}
	if err := r.cfg.Capturer.CheckLayers(chain, "checkpoint "+label(w.target)); err != nil {
		return nil, err
	}
	s := &start{from: FromDisk, release: func() {}, launch: Launch{RunID: durable.NewID(), AsIs: w.asIs}}
	if !w.boot {
		if err := r.checkFull(ctx, w); err != nil {
			return nil, err
		}
		if err := r.openMemory(ctx, w, s); err != nil {
			return nil, err
		}
	}
	top, err := r.top(ctx, w, s)
	if err != nil {
		return nil, errors.Join(err, s.giveUp(ctx, w))
	}
	if s.launch.Chain = append(chain, top); top.Format == catalog.RawFormat {
		s.launch.Chain = []catalog.Layer{top} // a copy of what there was
	}
	return s, nil
}

// beginRun begins the run. One that fails may have had a damaged memory file:
// mended says that it was so and is made anew the next time.
func (r *Restorer) beginRun(ctx context.Context, w want, m catalog.Machine, s *start) (begun Begun, mended bool, err error) {
	begun, err = w.destination.Begin(ctx, m, s.launch)
	if err == nil || s.from != FromMemoryFile || ctx.Err() != nil {
		return begun, false, err
	}
	if removed, failed := r.cfg.Memory.Check(ctx, w.target); failed != nil || !removed {
		return begun, false, err
	}
	return begun, true, errdefs.New(errdefs.KindOf(err), "%w; the memory file that it began from was damaged, and is made anew the next time: try again", err)
}

// openMemory opens the memory file.
func (r *Restorer) openMemory(ctx context.Context, w want, s *start) error {
	devices, err := r.cfg.Catalog.GetLayers(ctx, w.target.Full.Devices)
	if err != nil {
		return err
	}
	file, release, err := r.cfg.Memory.Open(ctx, w.target)
	switch {
	case errdefs.Is(err, errdefs.Storage):
		return errdefs.New(errdefs.Storage, "checkpoint %s: %w; choose another checkpoint, or its disk alone: %s", label(w.target), err, w.restoreDisk)
	case err != nil:
		return err
	}
	s.from, s.release = FromMemoryFile, sync.OnceFunc(release)
	if file.Made {
		s.from = FromLayers
	}
	s.launch.Incoming = &machine.Incoming{
		MemoryFile: file.Path, DeviceState: r.cfg.Capturer.Path(devices[0]),
		Checkpoint: w.target.ID, Unconfigured: w.target.Full.Unconfigured,
	}
	return nil
}

// top takes a standby with its top, or stages a fresh one: an empty one, or a
// copy of a raw disk.
func (r *Restorer) top(ctx context.Context, w want, s *start) (catalog.Layer, error) {
	if s.launch.Incoming != nil && !w.noStandby && !w.asIs { // a standby was begun to give proof
		standby, found, err := r.cfg.Catalog.TakeStandby(ctx, w.operation, w.target.ID)
		if err != nil {
			return catalog.Layer{}, err
		}
		if found {
			s.from, s.launch.Standby, s.launch.RunID = FromStandby, true, standby.RunID
			layers, err := r.cfg.Catalog.GetLayers(ctx, standby.LayerID)
			if err != nil {
				return catalog.Layer{}, err
			}
			return layers[0], nil
		}
	}
	top, err := r.newTop(ctx, w)
	if err != nil {
		return catalog.Layer{}, err
	}
	if err := r.cfg.Catalog.AddLayer(ctx, w.operation, top); err != nil {
		r.cfg.Capturer.RemoveFile(r.cfg.Capturer.Path(top))
		return catalog.Layer{}, err
	}
	return top, nil
}

func (r *Restorer) newTop(ctx context.Context, w want) (catalog.Layer, error) {
	size := w.machine.Spec.DiskBytes
	if !w.machine.Spec.Raw() {
		return r.cfg.Capturer.NewLayer(ctx, w.machine.ID, size)
	}
	kept, err := r.cfg.Catalog.GetLayers(ctx, w.target.Layers...)
	if err == nil && len(kept) != 1 {
		err = errdefs.New(errdefs.Internal, "checkpoint %s: its raw disk has %d layers", label(w.target), len(kept))
	}
	if err != nil {
		return catalog.Layer{}, err
	}
	return r.cfg.Capturer.CopyDisk(ctx, w.machine.ID, r.cfg.Capturer.Path(kept[0]), size, w.progress)
}

// giveUp ends a start that no run was begun from. The top goes with the
// operation's lease.
func (s *start) giveUp(ctx context.Context, w want) error {
	s.release()
	if !s.launch.Standby {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := w.destination.End(ctx, w.machine.ID, s.launch.RunID); err != nil {
		return fmt.Errorf("end standby %s: %w", s.launch.RunID, err)
	}
	return nil
}
