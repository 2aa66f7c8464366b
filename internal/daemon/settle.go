//go:build linux

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// settle brings the home to a known state after whatever ended the daemon
// before: runs are adopted, unfinished operations finished or undone by their
// phase, and what nobody knows of is removed. Boots that this needs go on
// while the daemon serves already.
func (d *Daemon) settle(ctx context.Context) error {
	machines, err := d.catalog.ListMachines(ctx)
	if err != nil {
		return err
	}
	unfinished, err := d.catalog.Unfinished(ctx)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, m := range machines {
		wg.Go(func() {
			if err := d.keeper.Adopt(ctx, m); err != nil {
				d.cfg.Log.Error("adopt a machine", "machine", m.Name, "error", err)
			}
		})
	}
	wg.Wait()
	if err := d.removeUnknown(ctx); err != nil {
		d.cfg.Log.Warn("remove leftovers", "error", err)
	}
	for _, op := range unfinished {
		d.cfg.Log.Info("settle an unfinished operation", "operation", op.ID, "verb", op.Verb, "phase", op.Phase)
		d.engine.Resume(op, storyDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
			return d.settleOne(ctx, w, op)
		})
	}
	return nil
}

// interrupted is the outcome of an operation that was undone.
func interrupted(op catalog.Operation, undone string) error {
	return errdefs.New(errdefs.Interrupted, "%s: the daemon ended meanwhile; %s; try again", op.Verb, undone)
}

// settleOne finishes or undoes one operation by its phase.
func (d *Daemon) settleOne(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	if op.Phase == "" {
		return nil, interrupted(op, "nothing was done")
	}
	switch op.Verb {
	case "run":
		return d.settleRun(ctx, w, op)
	case "checkpoint create":
		return d.settleCheckpoint(ctx, w, op)
	case "restore":
		return d.settleRestore(ctx, w, op)
	case "rm":
		m, err := d.catalog.GetMachine(ctx, op.MachineID)
		if errdefs.Is(err, errdefs.NotFound) {
			return nil, d.keeper.Forget(op.MachineID)
		}
		if err != nil {
			return nil, err
		}
		return nil, machineAPI{d}.drop(ctx, op.ID, m)
	case "start":
		m, err := d.catalog.GetMachine(ctx, op.MachineID)
		if err != nil {
			return nil, err
		}
		if err := d.ensureRunning(ctx, m); err != nil {
			return nil, err
		}
		return d.machineResult(ctx, m.ID)
	}
	return nil, interrupted(op, "look at its state")
}

// ensureRunning awaits the machine's adopted run, or boots it.
func (d *Daemon) ensureRunning(ctx context.Context, m catalog.Machine) error {
	if run := d.keeper.Run(m.ID); run != nil {
		err := run.AwaitReady(ctx)
		if err == nil {
			return d.catalog.SetMachineState(ctx, m.ID, machine.Running)
		}
		if !errdefs.Is(err, errdefs.WrongState) {
			return err
		}
	}
	_, err := d.keeper.Boot(ctx, m.ID)
	return err
}

// settleRun keeps a machine whose guest came up, and removes any other.
func (d *Daemon) settleRun(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	var detail runDetail
	if err := json.Unmarshal(op.Detail, &detail); err != nil {
		return nil, errdefs.New(errdefs.Storage, "settle run: read its detail: %w", err)
	}
	m, err := d.catalog.GetMachine(ctx, detail.MachineID)
	if errdefs.Is(err, errdefs.NotFound) {
		return nil, interrupted(op, "no machine was made")
	}
	if err != nil {
		return nil, err
	}
	if run := d.keeper.Run(m.ID); run != nil && run.AwaitReady(ctx) == nil {
		if err := d.catalog.SetMachineState(ctx, m.ID, machine.Running); err != nil {
			return nil, err
		}
		return d.machineResult(ctx, m.ID)
	}
	if err := (machineAPI{d}).drop(ctx, op.ID, m); err != nil {
		return nil, err
	}
	return nil, interrupted(op, "the machine was removed again")
}

// settleCheckpoint finishes a checkpoint that was published, and takes back
// any other. Either way the machine runs again if it ran.
func (d *Daemon) settleCheckpoint(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	var detail capture.Detail
	if err := json.Unmarshal(op.Detail, &detail); err != nil {
		return nil, errdefs.New(errdefs.Storage, "settle checkpoint: read its detail: %w", err)
	}
	m, err := d.catalog.GetMachine(ctx, op.MachineID)
	if err != nil {
		return nil, err
	}
	_, open, err := d.gates.Close(m.ID, fmt.Sprintf("a checkpoint of %s is settled", m.Name))
	if err != nil {
		return nil, err
	}
	defer open()
	if detail.Running {
		if err := d.returnMachine(ctx, m, op.Phase == capture.PhaseStop); err != nil {
			return nil, err
		}
	}
	k, err := d.catalog.GetCheckpoint(ctx, detail.CheckpointID)
	if errdefs.Is(err, errdefs.NotFound) {
		if err := d.capturer.DiscardUnused(ctx, m.ID); err != nil {
			return nil, err
		}
		return nil, interrupted(op, "no checkpoint was made and the machine runs on")
	}
	if err != nil {
		return nil, err
	}
	view, err := d.checkpointView(k, m)
	if err != nil {
		return nil, err
	}
	w.Note("the daemon ended while the machine was brought back; times are not known")
	return &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{Checkpoint: view, DiskBytes: k.DiskBytes}}, nil
}

// returnMachine sees to it that a machine whose guest may have been asked to
// stop runs.
func (d *Daemon) returnMachine(ctx context.Context, m catalog.Machine, asked bool) error {
	run := d.keeper.Run(m.ID)
	if run != nil && asked {
		// There is no way to unask: see it through, then boot.
		if _, err := run.Stop(ctx, stopPatience); err != nil && !errdefs.Is(err, errdefs.WrongState) {
			if errdefs.Is(err, errdefs.Deadline) {
				return nil // it was not asked, or does not hear: it runs
			}
			return err
		}
	}
	return d.ensureRunning(ctx, m)
}

// settleRestore finishes a restore that was committed, and lets the source go
// on after any other.
func (d *Daemon) settleRestore(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	var detail restore.Detail
	if err := json.Unmarshal(op.Detail, &detail); err != nil {
		return nil, errdefs.New(errdefs.Storage, "settle restore: read its detail: %w", err)
	}
	m, err := d.catalog.GetMachine(ctx, op.MachineID)
	if err != nil {
		return nil, err
	}
	_, open, err := d.gates.Close(m.ID, fmt.Sprintf("a restore of %s is settled", m.Name))
	if err != nil {
		return nil, err
	}
	defer open()
	if m.RunID == detail.Run {
		if detail.SourceRun != "" {
			if err := d.keeper.End(ctx, m.ID, detail.SourceRun); err != nil {
				return nil, err
			}
		}
		if err := d.ensureRunning(ctx, m); err != nil {
			return nil, err
		}
		w.Note("the daemon ended while the restore was under way; it was committed and is finished")
		result, err := d.machineResult(ctx, m.ID)
		if err != nil {
			return nil, err
		}
		result.Restore = &holdpointv1.RestoreResult{Generation: m.Generation}
		return result, nil
	}
	if err := d.keeper.End(ctx, m.ID, detail.Run); err != nil {
		return nil, err
	}
	if err := d.goOn(ctx, m, detail); err != nil {
		return nil, err
	}
	return nil, interrupted(op, "the machine was not restored and goes on")
}

// goOn brings the source of a restore back to the state it had.
func (d *Daemon) goOn(ctx context.Context, m catalog.Machine, detail restore.Detail) error {
	if detail.SourceRun == "" {
		return nil
	}
	run := d.keeper.Run(m.ID)
	paused := detail.State == string(machine.Paused)
	if run == nil || run.Ended() {
		return d.ensureRunning(ctx, m)
	}
	if keeper.State(m, run) == machine.Paused {
		if paused {
			return nil
		}
		return d.keeper.SetPaused(ctx, m, false)
	}
	return d.returnMachine(ctx, m, detail.SafetyID != "")
}

// removeUnknown removes files that no record tells of: what a crash left
// between making a file and recording it.
func (d *Daemon) removeUnknown(ctx context.Context) error {
	layers, err := d.catalog.ListLayers(ctx)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, layer := range layers {
		known[d.capturer.Path(layer)] = true
	}
	entries, err := os.ReadDir(d.cfg.Home.Layers())
	if err != nil {
		return errdefs.New(errdefs.Storage, "list layers: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		path := filepath.Join(d.cfg.Home.Layers(), entry.Name())
		if !known[path] && strings.HasSuffix(path, ".qcow2") {
			errs = append(errs, d.cfg.Files.Remove(path))
		}
	}
	errs = append(errs, image.Sweep(ctx, d.buildConfig()), d.capturer.Sweep(ctx))
	return errors.Join(errs...)
}

// spaceCheck says how much room the home has.
func (d *Daemon) spaceCheck() Check {
	check := Check{Name: "free space", State: "ok"}
	free, err := durable.FreeBytes(d.cfg.Home.Dir())
	if err != nil {
		return Check{Name: check.Name, State: "failed", Detail: err.Error(), Fix: "look at the file system of " + d.cfg.Home.Dir()}
	}
	check.Detail = fmt.Sprintf("%d MiB in %s", free>>20, d.cfg.Home.Dir())
	if free < 4<<30 {
		check.State, check.Fix = "degraded", "free some space, or move the home with HOLDPOINT_HOME"
	}
	return check
}
