package restore

import (
	"context"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// safety keeps what the restore discards, and leaves the source ended or
// paused. It never refuses a broken guest: one that does not shut down in time
// is caught as after a power cut, and one that cannot even be paused is ended.
func (a *attempt) safety(ctx context.Context) (*checkpoint.Checkpoint, error) {
	if a.NoSafety {
		if err := a.Enter(ctx, PhaseSafety, "pausing the machine", a.detail); err != nil {
			return nil, err
		}
		return nil, a.pauseOrKill(ctx)
	}
	if a.Machine.State == machine.Suspended {
		head, err := a.cfg.Catalog.GetCheckpoint(ctx, a.Machine.Head)
		if err != nil {
			return nil, err
		}
		return &head, nil // nothing has happened since
	}
	a.detail.SafetyID = durable.NewID()
	if a.Source != nil && a.Capture != nil {
		ckpt, err := a.fullSafety(ctx)
		if err == nil || ctx.Err() != nil {
			return ckpt, err
		}
		if errdefs.Is(err, errdefs.NoSpace) { // the guest is not broken, and what it runs would be lost
			return nil, fmt.Errorf("keep the present state of %s: %w; or restore without keeping it: --no-safety", a.Machine.Name, err)
		}
		a.Note("of the present state only the disk is kept: %v", err)
		a.detail.Safety = nil
	}
	if err := a.Enter(ctx, PhaseSafety, "keeping the present state", a.detail); err != nil {
		return nil, err
	}
	ckpt, err := a.diskSafety(ctx)
	if err != nil {
		return nil, fmt.Errorf("keep the present state of %s: %w", a.Machine.Name, err)
	}
	return &ckpt, nil
}

// diskSafety keeps the machine's disk: what was written so far is sealed, or a
// raw disk copied.
func (a *attempt) diskSafety(ctx context.Context) (k checkpoint.Checkpoint, err error) {
	var top catalog.Layer
	raw := a.Machine.Spec.Raw()
	if raw {
		err = a.cfg.Capturer.CheckRoom(ctx, a.Machine)
	} else {
		top, err = a.cfg.Capturer.Prepare(ctx, a.Machine)
		a.detail.Top = top.ID
	}
	if err != nil {
		return k, err
	}
	consistency, err := a.still(ctx, top)
	if err != nil {
		return k, err
	}
	k = checkpoint.Checkpoint{
		ID: a.detail.SafetyID, Kind: checkpoint.Disk, Consistency: consistency, Automatic: true,
		Message: "before restore to " + label(a.Target), Routes: a.Routes,
	}
	if !raw {
		return a.cfg.Capturer.Publish(ctx, a.Machine, k)
	}
	k, _, err = a.cfg.Capturer.PublishCopy(ctx, capture.RawRequest{Operation: a.Operation, Machine: a.Machine, Checkpoint: k, Progress: a.Progress})
	return k, err
}

// fullSafety keeps the whole machine, which stands still from then on.
func (a *attempt) fullSafety(ctx context.Context) (*checkpoint.Checkpoint, error) {
	began := time.Now()
	result, err := a.cfg.Capturer.Full(ctx, capture.FullRequest{
		Operation: a.Operation, Machine: a.Machine, Source: a.Capture, StayPaused: !a.Paused,
		Note: a.Note,
		Checkpoint: checkpoint.Checkpoint{
			ID: a.detail.SafetyID, Automatic: true, Message: "before restore to " + label(a.Target), Routes: a.Routes,
		},
		Enter: func(ctx context.Context, _, text string, detail any) error {
			if d, ok := detail.(capture.FullDetail); ok {
				a.detail.Safety = &d
			}
			return a.Enter(ctx, PhaseSafety, text, a.detail)
		},
	})
	if err != nil {
		return nil, err
	}
	a.down = began.Add(result.Prepare + result.Capture - result.Downtime)
	if a.switched = true; !a.Paused {
		a.kept = &result.Detail
	}
	return &result.Checkpoint, nil
}

// still brings the source to where its disk can be sealed or copied, and says how
// consistent that leaves it. top is the next overlay, but of a raw disk.
func (a *attempt) still(ctx context.Context, top catalog.Layer) (checkpoint.Consistency, error) {
	if a.Source == nil {
		if a.WasClean {
			return checkpoint.Stopped, nil
		}
		return checkpoint.Crash, nil
	}
	if !a.Paused {
		clean, err := a.Source.Stop(context.WithoutCancel(ctx))
		if err == nil {
			a.sourceEnded = true
			if clean {
				return checkpoint.Stopped, nil
			}
			return checkpoint.Crash, nil
		}
		a.Note("the guest did not shut down (%v); the state before the restore is kept as after a power cut", err)
	}
	if err := a.pauseOrKill(ctx); err != nil {
		return "", err
	}
	if a.sourceEnded || a.Machine.Spec.Raw() { // while it is paused nothing is written
		return checkpoint.Crash, nil
	}
	// The new top counts from the moment it may be written to.
	if err := a.cfg.Catalog.BeginRun(ctx, a.Machine.ID, a.detail.SourceRun); err != nil {
		return "", err
	}
	a.switched = true
	if err := a.Source.SwitchDisk(ctx, top); err != nil {
		a.Note("the disk of the running guest could not be switched (%v); its run was ended", err)
		return checkpoint.Crash, a.kill(ctx)
	}
	return checkpoint.Crash, nil
}

func (a *attempt) pauseOrKill(ctx context.Context) error {
	if a.Source == nil || a.Paused {
		return nil
	}
	if err := a.Source.Pause(ctx); err != nil {
		a.Note("the machine could not be paused (%v); its run was ended", err)
		return a.kill(ctx)
	}
	return nil
}

func (a *attempt) kill(ctx context.Context) error {
	if err := a.Source.Kill(ctx); err != nil {
		return fmt.Errorf("end the run of %s: %w", a.Machine.Name, err)
	}
	a.sourceEnded = true
	return nil
}

func label(c checkpoint.Checkpoint) string {
	if c.Name != "" {
		return c.Name
	}
	return c.ID
}
