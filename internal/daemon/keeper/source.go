//go:build linux

package keeper

import (
	"context"
	"fmt"
	"time"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// Source is a machine's current run, for a capture or a restore.
type Source struct {
	keeper   *Keeper
	run      *fleet.Run
	machine  string
	patience time.Duration
	note     func(format string, args ...any)
}

// Source gives the machine's run to a capture or restore; patience is how long
// its guest may take to shut down, and note is told what a person should read.
func (k *Keeper) Source(machineID string, run *fleet.Run, patience time.Duration, note func(string, ...any)) *Source {
	return &Source{keeper: k, run: run, machine: machineID, patience: patience, note: note}
}

// Stop asks the guest to shut down within the patience.
func (s *Source) Stop(ctx context.Context) (clean bool, err error) {
	return s.run.Stop(ctx, s.patience)
}

// Kill ends the run as a power cut would.
func (s *Source) Kill(ctx context.Context) error { return s.run.Kill(ctx) }

// Pause stops the vCPUs.
func (s *Source) Pause(ctx context.Context) error { return s.run.Pause(ctx) }

// Resume lets the vCPUs go.
func (s *Source) Resume(ctx context.Context) error { return s.run.Resume(ctx) }

// SwitchDisk gives the paused run a new top to write to.
func (s *Source) SwitchDisk(ctx context.Context, top catalog.Layer) error {
	return s.run.SwitchDisk(ctx, s.keeper.layer(top))
}

// Boot begins a run of the machine's recorded chain.
func (s *Source) Boot(ctx context.Context) error {
	note, err := s.keeper.Boot(ctx, s.machine)
	if note != "" {
		s.note("%s", note)
	}
	return err
}

// Begin starts a run beside the machine's current one and returns when its
// guest has answered. On error nothing of it is left.
func (k *Keeper) Begin(ctx context.Context, m catalog.Machine, l restore.Launch) (restore.Begun, error) {
	if l.Incoming != nil {
		return restore.Begun{}, errdefs.New(errdefs.Unsupported, "begin a run of machine %s: it cannot be continued yet", m.Name)
	}
	began := time.Now()
	run, note, err := k.begin(ctx, m, l.RunID, l.Chain, func() error { return nil })
	if err != nil {
		k.fleet.Discard(l.RunID)
		return restore.Begun{}, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.beside[l.RunID] = run
	return restore.Begun{Answer: time.Since(began), Note: note}, nil
}

// Replace makes a run that was begun beside the machine's current one, and
// committed, its current one; m has the new generation.
func (k *Keeper) Replace(ctx context.Context, m catalog.Machine, runID string) error {
	k.mu.Lock()
	run := k.beside[runID]
	delete(k.beside, runID)
	k.mu.Unlock()
	k.fleet.SetCurrent(m.ID, run)
	k.cfg.Gates.SetGeneration(m.ID, m.Generation)
	return k.cfg.Catalog.SetMachineState(ctx, m.ID, machine.Running)
}

// End ends a run that was begun beside the machine's current one, by this
// daemon or an earlier one, and removes its folder.
func (k *Keeper) End(ctx context.Context, machineID, runID string) error {
	k.mu.Lock()
	run := k.beside[runID]
	delete(k.beside, runID)
	k.mu.Unlock()
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
