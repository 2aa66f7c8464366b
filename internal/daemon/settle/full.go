//go:build linux

package settle

import (
	"context"
	"encoding/json"
	"fmt"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// source is the machine's run for a capture to be settled with; nil if it has
// none.
func (s *Settler) source(m catalog.Machine) capture.FullSource {
	run := s.cfg.Keeper.Run(m.ID)
	if run == nil || run.Ended() {
		return nil
	}
	return s.cfg.Keeper.Source(m.ID, run, patience, func(string, ...any) {})
}

// read reads an operation's detail.
func read(op catalog.Operation, detail any) error {
	if err := json.Unmarshal(op.Detail, detail); err != nil {
		return errdefs.New(errdefs.Storage, "settle %s: read its detail: %w", op.Verb, err)
	}
	return nil
}

// shut gives the operation's machine with its gate closed until open is called.
func (s *Settler) shut(ctx context.Context, op catalog.Operation, what string) (m catalog.Machine, open func(), err error) {
	if m, err = s.cfg.Catalog.GetMachine(ctx, op.MachineID); err != nil {
		return m, nil, err
	}
	_, open, err = s.cfg.Gates.Close(m.ID, fmt.Sprintf("a %s of %s is settled", what, m.Name))
	return m, open, err
}

// settleFull finishes a full checkpoint that was published, and takes back any
// other; the machine goes on.
func (s *Settler) settleFull(ctx context.Context, w *operation.Work, op catalog.Operation, detail capture.FullDetail) (*holdpointv1.OperationResult, error) {
	m, err := s.cfg.Catalog.GetMachine(ctx, op.MachineID)
	if err != nil {
		return nil, err
	}
	published, err := s.cfg.Capturer.SettleFull(ctx, m, detail, s.source(m), true)
	if err != nil {
		return nil, err
	}
	if !published {
		return nil, interrupted(op, "no checkpoint was made and the machine goes on")
	}
	k, err := s.cfg.Catalog.GetCheckpoint(ctx, detail.CheckpointID)
	if err != nil {
		return nil, err
	}
	view, err := s.cfg.View.Checkpoint(ctx, k, m)
	if err != nil {
		return nil, err
	}
	w.Note("the daemon ended when the checkpoint had just been published; times are not known")
	return &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{
		Checkpoint: view, DiskBytes: k.DiskBytes, MemoryBytes: view.GetMemoryBytes(),
	}}, nil
}

// settleSuspend sees a suspension through whose checkpoint is published, and
// lets the machine go on after any other.
func (s *Settler) settleSuspend(ctx context.Context, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	var detail capture.FullDetail
	if err := read(op, &detail); err != nil {
		return nil, err
	}
	m, open, err := s.shut(ctx, op, "suspension")
	if err != nil {
		return nil, err
	}
	defer open()
	source := s.source(m)
	var run restore.Killer
	if killer, living := source.(restore.Killer); living {
		run = killer
	}
	suspended, err := s.cfg.Restorer.SettleSuspend(ctx, m, detail, source, run)
	if err != nil {
		return nil, err
	}
	if !suspended {
		return nil, interrupted(op, "the machine is not suspended and goes on")
	}
	s.cfg.Keeper.Tidy(m.ID)
	if err := s.cfg.Files.RemoveAll(detail.Dir); err != nil {
		return nil, err
	}
	return s.cfg.View.MachineResult(ctx, m.ID)
}

// settleResume finishes a resume whose machine runs; any other machine stays
// suspended.
func (s *Settler) settleResume(ctx context.Context, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	var detail restore.ResumeDetail
	if err := read(op, &detail); err != nil {
		return nil, err
	}
	m, err := s.cfg.Catalog.GetMachine(ctx, op.MachineID)
	if err != nil {
		return nil, err
	}
	running, err := s.cfg.Restorer.SettleResume(ctx, m, detail, s.cfg.Keeper)
	if err != nil {
		return nil, err
	}
	if !running {
		return nil, interrupted(op, "the machine is suspended still")
	}
	return s.cfg.View.MachineResult(ctx, m.ID)
}

// settleFork keeps the machines of a fork that run, and removes those that were
// not done.
func (s *Settler) settleFork(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	var full capture.FullDetail
	if err := read(op, &full); err != nil {
		return nil, err
	}
	if full.RunID != "" {
		_, err := s.settleFull(ctx, w, op, full)
		if err == nil {
			err = interrupted(op, "a checkpoint was taken and no machine was made")
		}
		return nil, err
	}
	var detail restore.ForkDetail
	if err := read(op, &detail); err != nil {
		return nil, err
	}
	result := &holdpointv1.OperationResult{}
	for i, child := range detail.Children {
		made := &holdpointv1.ForkResult{Name: child.Name, Index: uint32(i + 1)}
		if err := s.settleChild(ctx, op, child, made); err != nil {
			made.Error = &holdpointv1.ErrorInfo{Kind: string(errdefs.KindOf(err)), Message: err.Error()}
		}
		result.Forks = append(result.Forks, made)
	}
	return result, nil
}

func (s *Settler) settleChild(ctx context.Context, op catalog.Operation, child restore.Child, made *holdpointv1.ForkResult) error {
	m, err := s.cfg.Catalog.GetMachine(ctx, child.MachineID)
	if errdefs.Is(err, errdefs.NotFound) {
		return interrupted(op, "the machine was not made")
	}
	if err != nil {
		return err
	}
	if m.State == machine.Creating {
		if err := s.drop(ctx, op, m); err != nil {
			return err
		}
		return interrupted(op, "the machine was removed again")
	}
	made.Machine, err = s.cfg.View.Machine(ctx, m)
	return err
}

// drop removes a machine, for an operation that holds it.
func (s *Settler) drop(ctx context.Context, op catalog.Operation, m catalog.Machine) error {
	list, err := s.cfg.Catalog.ListCheckpoints(ctx, m.ID)
	if err != nil {
		return err
	}
	for _, k := range list {
		if err := s.cfg.Pools.End(ctx, k.ID); err != nil {
			return err
		}
	}
	return s.cfg.Keeper.Drop(ctx, op.ID, m)
}
