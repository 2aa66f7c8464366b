package capture

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/sparse"
)

// returnTimeout bounds the boot that brings a machine back, whatever became
// of the operation that stopped it.
const returnTimeout = 3 * time.Minute

// Source is the running machine that a stopped checkpoint is taken of.
type Source interface {
	// Stop asks the guest to shut down and returns when its run has ended;
	// clean is whether the guest said that its file systems are, and the run
	// ended by itself. DEADLINE: it did not stop in time and goes on.
	Stop(ctx context.Context) (clean bool, err error)
	// Kill ends the run as a power cut would.
	Kill(ctx context.Context) error
	// Boot begins a run of the machine's recorded chain and returns when the
	// guest has answered.
	Boot(ctx context.Context) error
}

// The phases of a stopped checkpoint, in the journal.
const (
	PhasePrepare = "prepare"
	PhaseStop    = "stop"
	PhaseSeal    = "seal"
	// PhaseCopy is that of a raw disk, instead of PhaseSeal.
	PhaseCopy = "copy"
	PhaseBoot = "boot"
)

// Detail is what the journal keeps of a stopped checkpoint, to finish or undo
// it from any phase.
type Detail struct {
	CheckpointID string `json:"checkpoint_id"`
	// Layer is the prepared top; empty until it is.
	Layer string `json:"layer,omitempty"`
	// Running is whether the machine ran, and has to again.
	Running bool `json:"running"`
}

// StoppedRequest asks for a stopped checkpoint.
type StoppedRequest struct {
	// Operation keeps what is copied until it is published.
	Operation string
	Machine   catalog.Machine
	// Checkpoint has the id, name, message, routes and origin.
	Checkpoint checkpoint.Checkpoint
	// Source is nil for a machine that is stopped already.
	Source Source
	// WasClean is, of a machine that is stopped already, whether its guest
	// had shut down cleanly.
	WasClean bool
	// AllowCrash: a guest that does not stop is ended and the checkpoint is
	// marked crash.
	AllowCrash bool
	// Enter records a phase before its first effect.
	Enter func(ctx context.Context, phase, text string, detail any) error
	// Progress is told how many bytes of data of a raw disk are copied, of how
	// many.
	Progress func(done, total int64)
}

// StoppedResult is a published checkpoint and where the time went.
type StoppedResult struct {
	Checkpoint checkpoint.Checkpoint
	// Way is how a raw disk was copied; empty for a seal, which copies nothing.
	Way sparse.Way
	// Stop, Copy and Boot are the parts of the downtime.
	Stop, Copy, Boot time.Duration
	// Durable and Return are from the request to the durable record and to
	// the guest's first answer.
	Durable, Return time.Duration
}

// Stopped takes a checkpoint of a stopped disk: graceful stop, seal, boot. A raw
// disk, which cannot be sealed and gone on from, is copied instead. If
// it fails before the checkpoint is published the machine is booted again from
// its own disk and nothing is published. When only the boot fails, the result
// is complete and the error says so.
func (c *Capturer) Stopped(ctx context.Context, r StoppedRequest) (StoppedResult, error) {
	begun := time.Now()
	if r.Source == nil && !r.WasClean && !r.AllowCrash {
		return StoppedResult{}, errdefs.New(errdefs.Conflict,
			"checkpoint of %s: its guest was not shut down cleanly; start and stop it, or accept its disk as after a power cut with --allow-crash", r.Machine.Name)
	}
	detail := Detail{CheckpointID: r.Checkpoint.ID, Running: r.Source != nil}
	if err := c.prepareStopped(ctx, r, &detail); err != nil {
		return StoppedResult{}, err
	}
	result, down, err := c.stopAndPublish(ctx, r, detail)
	if err != nil {
		return StoppedResult{}, c.giveBack(ctx, r, detail, down, err)
	}
	result.Durable = time.Since(begun)
	if r.Source == nil {
		result.Return = result.Durable
		return result, nil
	}
	// From here on the checkpoint stands; the machine comes back even if the
	// operation was canceled meanwhile.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), returnTimeout)
	defer cancel()
	published := time.Now()
	if err := r.Enter(ctx, PhaseBoot, "booting the guest", detail); err != nil {
		return result, err
	}
	if err := r.Source.Boot(ctx); err != nil {
		return result, fmt.Errorf("checkpoint %s is published, but machine %s did not boot again: %w",
			result.Checkpoint.ID, r.Machine.Name, err)
	}
	result.Boot, result.Return = time.Since(published), time.Since(begun)
	return result, nil
}

// prepareStopped is what is done while the machine runs: the next overlay is
// made, or room found for a copy.
func (c *Capturer) prepareStopped(ctx context.Context, r StoppedRequest, detail *Detail) error {
	text := "preparing the next overlay"
	if r.Machine.Spec.Raw() {
		text = "looking for room for a copy of the disk"
	}
	if err := r.Enter(ctx, PhasePrepare, text, *detail); err != nil {
		return err
	}
	if r.Machine.Spec.Raw() {
		return c.CheckRoom(ctx, r.Machine)
	}
	layer, err := c.Prepare(ctx, r.Machine)
	detail.Layer = layer.ID
	return err
}

// stopAndPublish is the part in which the machine stands still; down is
// whether its run has ended.
func (c *Capturer) stopAndPublish(ctx context.Context, r StoppedRequest, detail Detail) (result StoppedResult, down bool, err error) {
	r.Checkpoint.Kind, r.Checkpoint.Consistency = checkpoint.Disk, checkpoint.Stopped
	stopping := time.Now()
	if r.Source != nil {
		if err := r.Enter(ctx, PhaseStop, "stopping the guest", detail); err != nil {
			return result, false, err
		}
		clean, down, err := c.stop(ctx, r)
		if err != nil {
			return result, down, err
		}
		r.WasClean = clean
	}
	if !r.WasClean {
		r.Checkpoint.Consistency = checkpoint.Crash
	}
	stopped := time.Now()
	if err := ctx.Err(); err != nil {
		return result, true, fmt.Errorf("checkpoint of %s: %w", r.Machine.Name, context.Cause(ctx))
	}
	result.Checkpoint, result.Way, err = c.keepStopped(ctx, r, detail)
	if err != nil {
		return result, true, err
	}
	result.Stop, result.Copy = stopped.Sub(stopping), time.Since(stopped)
	return result, true, nil
}

// keepStopped seals or copies the disk, and publishes that.
func (c *Capturer) keepStopped(ctx context.Context, r StoppedRequest, detail Detail) (k checkpoint.Checkpoint, way sparse.Way, err error) {
	raw := r.Machine.Spec.Raw()
	switch {
	case raw:
		err = r.Enter(ctx, PhaseCopy, "copying the disk", detail)
	case r.Source == nil: // else no time is lost for a record of it
		err = r.Enter(ctx, PhaseSeal, "sealing the disk", detail)
	}
	switch {
	case err != nil:
		return k, "", err
	case !raw:
		k, err = c.Publish(ctx, r.Machine, r.Checkpoint)
		return k, "", err
	}
	k, way, err = c.PublishCopy(ctx, RawRequest{Operation: r.Operation, Machine: r.Machine, Checkpoint: r.Checkpoint, Progress: r.Progress})
	if err != nil {
		return k, "", fmt.Errorf("checkpoint of %s: %w", r.Machine.Name, err)
	}
	return k, way, nil
}

// stop ends the run, gracefully, or by force where that was allowed.
func (c *Capturer) stop(ctx context.Context, r StoppedRequest) (clean, down bool, err error) {
	// Once the guest was asked to stop there is no way to unask: a canceled
	// operation waits for the end of that and boots the machine again.
	clean, err = r.Source.Stop(context.WithoutCancel(ctx))
	switch {
	case err == nil && (clean || r.AllowCrash):
		return clean, true, nil
	case err == nil:
		return false, true, errdefs.New(errdefs.Conflict,
			"checkpoint of %s: the guest did not shut down cleanly; try again, or accept its disk as after a power cut with --allow-crash", r.Machine.Name)
	case !r.AllowCrash || ctx.Err() != nil:
		return false, false, fmt.Errorf("checkpoint of %s: stop the guest: %w", r.Machine.Name, err)
	}
	if killErr := r.Source.Kill(ctx); killErr != nil {
		return false, false, errors.Join(err, killErr)
	}
	return false, true, nil
}

// giveBack undoes a checkpoint that was not published: the machine runs again
// on its own disk. The prepared overlay goes if the run never ended; else the
// disk below may be sealed already, and the machine goes on with it.
func (c *Capturer) giveBack(ctx context.Context, r StoppedRequest, detail Detail, down bool, failure error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), returnTimeout)
	defer cancel()
	if !down {
		if err := c.Discard(ctx, r.Machine.ID, detail.Layer); err != nil {
			failure = errors.Join(failure, err)
		}
	}
	if down && r.Source != nil {
		if err := r.Source.Boot(ctx); err != nil {
			return errdefs.New(errdefs.KindOf(failure), "%w; and machine %s did not boot again: %w; run holdpoint start %s",
				failure, r.Machine.Name, err, r.Machine.Name)
		}
	}
	return failure
}
