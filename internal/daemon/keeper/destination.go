//go:build linux

package keeper

import (
	"context"
	"errors"
	"fmt"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// Begin starts a run, beside the machine's current one if it has one, and
// returns when its guest has answered. On error nothing of it is left.
func (k *Keeper) Begin(ctx context.Context, m catalog.Machine, l restore.Launch) (restore.Begun, error) {
	run, begun, err := k.begin(ctx, launch{Launch: l, machine: m})
	if err != nil {
		if waits := k.takeBeside(l.RunID); waits != nil && !waits.Ended() {
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTimeout)
			defer cancel()
			err = errors.Join(err, waits.Kill(end))
		}
		k.fleet.Discard(l.RunID)
		return begun, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.beside[l.RunID] = run
	return begun, nil
}

// takeBeside gives a run that is no machine's current one; nil if it is not known.
func (k *Keeper) takeBeside(runID string) *fleet.Run {
	k.mu.Lock()
	defer k.mu.Unlock()
	run := k.beside[runID]
	delete(k.beside, runID)
	return run
}

// Replace makes a run that was begun beside the machine's current one, and
// committed, its current one; m has the new generation.
func (k *Keeper) Replace(ctx context.Context, m catalog.Machine, runID string) error {
	run := k.takeBeside(runID)
	if run == nil {
		return errdefs.New(errdefs.Internal, "machine %s: its new run %s is not known", m.Name, runID)
	}
	k.fleet.SetCurrent(m.ID, run)
	k.cfg.Gates.SetGeneration(m.ID, m.Generation)
	return k.cfg.Catalog.SetMachineState(ctx, m.ID, machine.Running)
}

// End ends a run that was begun beside the machine's current one, by this
// daemon or an earlier one, and removes its folder.
func (k *Keeper) End(ctx context.Context, machineID, runID string) error {
	run := k.takeBeside(runID)
	if run == nil {
		adopting, cancel := context.WithTimeout(ctx, adoptTimeout)
		defer cancel()
		run = k.fleet.Adopt(adopting, machineID, runID)
	}
	if err := run.Kill(ctx); err != nil && !errdefs.Is(err, errdefs.WrongState) {
		return err
	}
	k.fleet.Discard(runID)
	return nil
}

// Drop removes a machine with all that is its own, for an operation that holds
// it. Its run is ended first.
func (k *Keeper) Drop(ctx context.Context, operationID string, m catalog.Machine) error {
	if run := k.Run(m.ID); run != nil {
		if err := run.Kill(ctx); err != nil && !errdefs.Is(err, errdefs.WrongState) {
			return fmt.Errorf("remove machine %s: %w", m.Name, err)
		}
	}
	if err := k.cfg.Catalog.RemoveMachine(ctx, m.ID, operationID); err != nil {
		return err
	}
	k.Forget(m.ID)
	return nil
}

// Forget drops what is kept of a machine that is no more: its gate, and the
// folders of its runs.
func (k *Keeper) Forget(machineID string) {
	k.fleet.SetCurrent(machineID, nil)
	k.cfg.Gates.Forget(machineID)
	k.fleet.Forget(machineID)
}

// SetPaused stops the vCPUs of the machine's run on a user's word, or lets them go.
func (k *Keeper) SetPaused(ctx context.Context, m catalog.Machine, paused bool) error {
	run := k.Run(m.ID)
	if run == nil {
		return errdefs.New(errdefs.WrongState, "machine %s has no run", m.Name)
	}
	state, act := machine.Running, run.Resume
	if paused {
		state, act = machine.Paused, run.Pause
	}
	if err := act(ctx); err != nil {
		return err
	}
	err := run.Await(ctx, "the machine to be "+string(state), func(s *monitorv1.StatusResponse) bool {
		return (s.GetPhase() == monitorv1.Phase_PHASE_USER_PAUSED) == paused && s.GetPhase() >= monitorv1.Phase_PHASE_BOOTING
	})
	if err != nil {
		return err
	}
	return k.cfg.Catalog.SetMachineState(ctx, m.ID, state)
}
