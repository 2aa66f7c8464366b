//go:build linux

package settle

import (
	"context"
	"encoding/json"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/machines"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// settleOne finishes or undoes one operation by its phase.
func (s *Settler) settleOne(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	if op.Phase == "" {
		return s.settleUnentered(ctx, op)
	}
	switch op.Verb {
	case "run":
		return s.settleRun(ctx, w, op)
	case "checkpoint create":
		return s.settleCheckpoint(ctx, w, op)
	case "restore":
		return s.settleRestore(ctx, w, op)
	case "suspend":
		return s.settleSuspend(ctx, op)
	case "resume":
		return s.settleResume(ctx, op)
	case "fork":
		return s.settleFork(ctx, w, op)
	case "rm":
		m, err := s.cfg.Catalog.GetMachine(ctx, op.MachineID)
		if errdefs.Is(err, errdefs.NotFound) {
			s.cfg.Keeper.Forget(op.MachineID)
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return nil, s.drop(ctx, op, m)
	case "start":
		m, err := s.cfg.Catalog.GetMachine(ctx, op.MachineID)
		if err != nil {
			return nil, err
		}
		if err := s.ensureRunning(ctx, m); err != nil {
			return nil, err
		}
		return s.cfg.View.MachineResult(ctx, m.ID)
	}
	return nil, interrupted(op, "look at its state")
}

// ensureRunning awaits the machine's adopted run, or boots it.
func (s *Settler) ensureRunning(ctx context.Context, m catalog.Machine) error {
	if run := s.cfg.Keeper.Run(m.ID); run != nil {
		err := run.AwaitReady(ctx)
		if err == nil {
			return s.cfg.Catalog.SetMachineState(ctx, m.ID, machine.Running)
		}
		if !errdefs.Is(err, errdefs.WrongState) {
			return err
		}
	}
	_, err := s.cfg.Keeper.Boot(ctx, m.ID)
	return err
}

// settleRun keeps a machine whose guest came up, and removes any other.
func (s *Settler) settleRun(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	var detail machines.Detail
	if err := read(op, &detail); err != nil {
		return nil, err
	}
	m, err := s.cfg.Catalog.GetMachine(ctx, detail.MachineID)
	if errdefs.Is(err, errdefs.NotFound) {
		return nil, interrupted(op, "no machine was made")
	}
	if err != nil {
		return nil, err
	}
	if run := s.cfg.Keeper.Run(m.ID); run != nil && !run.Status().GetWaiting() && run.AwaitReady(ctx) == nil {
		if err := s.cfg.Catalog.SetMachineState(ctx, m.ID, machine.Running); err != nil {
			return nil, err
		}
		return s.cfg.View.MachineResult(ctx, m.ID)
	}
	if err := s.drop(ctx, op, m); err != nil {
		return nil, err
	}
	return nil, interrupted(op, "the machine was removed again")
}

// settleCheckpoint finishes a checkpoint that was published, and takes back
// any other. Either way the machine runs again if it ran.
func (s *Settler) settleCheckpoint(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	var full capture.FullDetail
	if err := json.Unmarshal(op.Detail, &full); err == nil && full.RunID != "" {
		return s.settleFull(ctx, w, op, full)
	}
	var detail capture.Detail
	if err := read(op, &detail); err != nil {
		return nil, err
	}
	m, open, err := s.shut(ctx, op, "checkpoint")
	if err != nil {
		return nil, err
	}
	defer open()
	if detail.Running {
		if err := s.returnMachine(ctx, m, op.Phase == capture.PhaseStop); err != nil {
			return nil, err
		}
	}
	k, err := s.cfg.Catalog.GetCheckpoint(ctx, detail.CheckpointID)
	if errdefs.Is(err, errdefs.NotFound) {
		if err := s.cfg.Capturer.DiscardUnused(ctx, m.ID); err != nil {
			return nil, err
		}
		return nil, interrupted(op, "no checkpoint was made and the machine runs on")
	}
	if err != nil {
		return nil, err
	}
	view, err := s.cfg.View.Checkpoint(ctx, k, m)
	if err != nil {
		return nil, err
	}
	w.Note("the daemon ended while the machine was brought back; times are not known")
	return &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{Checkpoint: view, DiskBytes: k.DiskBytes}}, nil
}

// returnMachine sees to it that a machine whose guest may have been asked to
// stop runs.
func (s *Settler) returnMachine(ctx context.Context, m catalog.Machine, asked bool) error {
	run := s.cfg.Keeper.Run(m.ID)
	if run != nil && asked {
		// There is no way to unask: see it through, then boot.
		if _, err := run.Stop(ctx, patience); err != nil && !errdefs.Is(err, errdefs.WrongState) {
			if errdefs.Is(err, errdefs.Deadline) {
				return nil // it was not asked, or does not hear: it runs
			}
			return err
		}
	}
	return s.ensureRunning(ctx, m)
}

// settleRestore finishes a restore that was committed, and lets the source go
// on after any other.
func (s *Settler) settleRestore(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	var detail restore.Detail
	if err := read(op, &detail); err != nil {
		return nil, err
	}
	m, open, err := s.shut(ctx, op, "restore")
	if err != nil {
		return nil, err
	}
	defer open()
	if m.RunID == detail.Run {
		if detail.SourceRun != "" {
			if err := s.cfg.Keeper.End(ctx, m.ID, detail.SourceRun); err != nil {
				return nil, err
			}
		}
		if err := s.ensureRunning(ctx, m); err != nil {
			return nil, err
		}
		w.Note("the daemon ended while the restore was under way; it was committed and is finished")
		result, err := s.cfg.View.MachineResult(ctx, m.ID)
		if err != nil {
			return nil, err
		}
		result.Restore = &holdpointv1.RestoreResult{Generation: m.Generation}
		return result, nil
	}
	if err := s.cfg.Keeper.End(ctx, m.ID, detail.Run); err != nil {
		return nil, err
	}
	if err := s.goOn(ctx, m, detail); err != nil {
		return nil, err
	}
	return nil, interrupted(op, "the machine was not restored and goes on")
}

// goOn brings the source of a restore back to the state it had.
func (s *Settler) goOn(ctx context.Context, m catalog.Machine, detail restore.Detail) error {
	if detail.SourceRun == "" {
		return nil
	}
	run := s.cfg.Keeper.Run(m.ID)
	paused := detail.State == string(machine.Paused)
	if detail.Safety != nil {
		if _, err := s.cfg.Capturer.SettleFull(ctx, m, *detail.Safety, s.source(m), !paused); err != nil {
			return err
		}
		if run != nil && !run.Ended() {
			return nil
		}
	}
	if run == nil || run.Ended() {
		return s.ensureRunning(ctx, m)
	}
	if keeper.State(m, run) == machine.Paused {
		if paused {
			return nil
		}
		return s.cfg.Keeper.SetPaused(ctx, m, false)
	}
	return s.returnMachine(ctx, m, detail.SafetyID != "")
}
