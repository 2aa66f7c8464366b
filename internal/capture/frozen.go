package capture

import (
	"context"
	"errors"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
)

// PhaseFreeze is that of a frozen checkpoint in the journal, after PhasePrepare,
// with a FullDetail without a folder. From it on the prepared top may be written to.
const PhaseFreeze = "freeze"

// FrozenSource is the running machine that a frozen checkpoint is taken of.
type FrozenSource interface {
	FullSource
	// SwitchAtRest gives the run a new top to write to while its guest has frozen
	// its file systems, which it thaws by itself in any case. On error the top is
	// the old or the new one, as Disk says, and what is below the new one may have
	// been written to after the freeze.
	SwitchAtRest(ctx context.Context, top catalog.Layer, o FreezeOrder) (Rest, error)
}

// FreezeOrder is how a guest freezes.
type FreezeOrder struct {
	// Limit is how long its file systems may be frozen.
	Limit time.Duration
	// AllowHookFailure freezes them also when a hook of the guest fails.
	AllowHookFailure bool
}

// Rest says how a guest froze. Hooks and Sync were before it; Freeze, up to the
// last file system, and Switch are parts of Frozen.
type Rest struct {
	Hooks, Sync, Freeze, Switch, Frozen time.Duration
	// HookFailure is what went wrong with the guest's hooks, if that was allowed.
	HookFailure string
}

// FrozenRequest asks for a frozen checkpoint.
type FrozenRequest struct {
	Machine catalog.Machine
	// Checkpoint has the id, name, message, routes and origin.
	Checkpoint checkpoint.Checkpoint
	Source     FrozenSource
	Order      FreezeOrder
	// Enter records a phase before its first effect; detail is a FullDetail.
	Enter func(ctx context.Context, phase, text string, detail any) error
}

// FrozenResult is a published checkpoint and where the time went.
type FrozenResult struct {
	Checkpoint checkpoint.Checkpoint
	Rest       Rest
	// Prepare, Capture and Publish are what Durable, from the request to the
	// durable record, consists of.
	Prepare, Capture, Publish, Durable time.Duration
}

// Frozen takes a checkpoint of a running machine's disk while its guest has frozen
// its file systems. In that time the disk is switched, and nothing is copied. On
// error nothing is published and the machine goes on, with its disk's old top or
// its new one.
func (c *Capturer) Frozen(ctx context.Context, r FrozenRequest) (result FrozenResult, err error) {
	began := time.Now()
	detail := FullDetail{CheckpointID: r.Checkpoint.ID, RunID: r.Machine.RunID}
	if err := r.Enter(ctx, PhasePrepare, "preparing the next overlay", detail); err != nil {
		return result, err
	}
	top, err := c.Prepare(ctx, r.Machine)
	if err != nil {
		return result, err
	}
	detail.Layer = top.ID
	if err := r.Enter(ctx, PhaseFreeze, "freezing the file systems", detail); err != nil {
		return result, errors.Join(err, c.Discard(context.WithoutCancel(ctx), r.Machine.ID, top.ID))
	}
	prepared := time.Now()
	result.Rest, err = r.Source.SwitchAtRest(ctx, top, r.Order)
	switched := time.Now()
	if err == nil {
		r.Checkpoint.Kind, r.Checkpoint.Consistency, r.Checkpoint.HookFailure = checkpoint.Disk, checkpoint.Frozen, result.Rest.HookFailure
		result.Checkpoint, err = c.Publish(ctx, r.Machine, r.Checkpoint)
	}
	if err != nil {
		if published, unknown := c.published(ctx, r.Checkpoint.ID); !published {
			return FrozenResult{}, c.takeBack(ctx, r.Machine, r.Source, detail, errors.Join(err, unknown))
		}
	}
	result.Prepare, result.Capture, result.Publish = prepared.Sub(began), switched.Sub(prepared), time.Since(switched)
	result.Durable = time.Since(began)
	return result, nil
}
