//go:build linux

package checkpoints

import (
	"cmp"
	"context"
	"fmt"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// How long a guest's file systems may be frozen.
const (
	defaultFreeze = 2 * time.Second
	maxFreeze     = 10 * time.Second
)

// checkFreeze checks what is asked of the freeze of a disk checkpoint.
func checkFreeze(r *holdpointv1.CreateCheckpointRequest) error {
	limit := time.Duration(r.GetFreezeLimitMillis()) * time.Millisecond
	switch stopped := r.GetMode() == string(checkpoint.Stopped); {
	case limit < 0 || limit > maxFreeze:
		return errdefs.New(errdefs.Invalid, "checkpoint create: a freeze limit of %s: use one up to %s", limit, maxFreeze)
	case stopped && (limit != 0 || r.GetAllowHookFailure()):
		return errdefs.New(errdefs.Invalid, "checkpoint create: a stopped checkpoint freezes nothing; leave the freeze limit and the hooks away, or use --mode frozen")
	case !stopped && (r.GetStopRunning() || r.GetAllowCrash()):
		return errdefs.New(errdefs.Invalid, "checkpoint create: a frozen checkpoint ends nothing; --stop-running and --allow-crash go with --mode stopped")
	}
	return nil
}

// createFrozen takes a checkpoint of the disk of a machine that goes on, and so do
// its doors: what is written meanwhile waits in the guest.
func (s *Service) createFrozen(ctx context.Context, w *operation.Work, r *holdpointv1.CreateCheckpointRequest, m catalog.Machine, run *fleet.Run) (*holdpointv1.OperationResult, error) {
	if err := machine.Allow("checkpoint create", m.Name, keeper.State(m, run), machine.Running); err != nil {
		return nil, err
	}
	if err := s.Catalog.CheckpointNameFree(ctx, m, r.GetName()); err != nil {
		return nil, err
	}
	if err := s.Prover.TrustDisk(ctx, m); err != nil {
		return nil, fmt.Errorf("checkpoint create: nothing could boot from it: %w", err)
	}
	routes, err := s.Keeper.RoutesNow(ctx, m, run)
	if err != nil {
		return nil, err
	}
	limit := time.Duration(r.GetFreezeLimitMillis()) * time.Millisecond
	result, err := s.Capturer.Frozen(ctx, capture.FrozenRequest{
		Machine:    m,
		Checkpoint: checkpoint.Checkpoint{ID: durable.NewID(), Name: r.GetName(), Message: r.GetMessage(), Routes: routes},
		Source:     s.Keeper.Source(m.ID, run, stopPatience, w.Note), Enter: w.Enter,
		Order: capture.FreezeOrder{Limit: cmp.Or(limit, defaultFreeze), AllowHookFailure: r.GetAllowHookFailure()},
	})
	if err != nil {
		return nil, err
	}
	if failed := result.Rest.HookFailure; failed != "" {
		w.Note("the checkpoint was made although this failed in the machine: %s", failed)
	}
	if err := s.Capturer.Settle(ctx, result.Checkpoint); err != nil {
		s.Log.Warn("measure sealed layers", "checkpoint", result.Checkpoint.ID, "error", err)
	}
	view, err := s.View.CheckpointNow(ctx, result.Checkpoint)
	if err != nil {
		return nil, err
	}
	rest := result.Rest
	return &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{
		Checkpoint: view, DowntimeMs: admission.Milliseconds(rest.Frozen), DurableMs: admission.Milliseconds(result.Durable),
		DiskBytes: result.Checkpoint.DiskBytes, PrepareMs: admission.Milliseconds(result.Prepare),
		CaptureMs: admission.Milliseconds(result.Capture), PublishMs: admission.Milliseconds(result.Publish),
		HooksMs: admission.Milliseconds(rest.Hooks), SyncMs: admission.Milliseconds(rest.Sync),
		FreezeMs: admission.Milliseconds(rest.Freeze), SwitchMs: admission.Milliseconds(rest.Switch),
	}}, nil
}
