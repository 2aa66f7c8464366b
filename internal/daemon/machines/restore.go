//go:build linux

package machines

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/proof"
	"github.com/holdpoint/holdpoint/internal/daemon/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// restorePatience is how long a guest may take to shut down before a restore
// keeps its disk as after a power cut.
const restorePatience = 30 * time.Second

// target resolves what a restore is about and refuses what it cannot be.
func (s *Service) target(ctx context.Context, r *holdpointv1.RestoreMachineRequest) (catalog.Machine, checkpoint.Checkpoint, error) {
	m, err := s.Catalog.ResolveMachine(ctx, r.GetMachine())
	if err != nil {
		return m, checkpoint.Checkpoint{}, err
	}
	k, err := s.Catalog.ResolveCheckpoint(ctx, m.ID, r.GetCheckpoint())
	if err != nil {
		return m, k, err
	}
	if r.GetKind() == string(checkpoint.Full) && k.Full == nil {
		return m, k, errdefs.New(errdefs.KindMismatch, "restore: %s is a disk checkpoint, it has no memory to continue; its disk: holdpoint restore %s %s --disk",
			r.GetCheckpoint(), m.Name, r.GetCheckpoint())
	}
	if r.GetGeneration() != 0 && r.GetGeneration() != m.Generation {
		return m, k, errdefs.New(errdefs.Conflict, "restore: machine %s is in generation %d, this was meant for %d; look at its state and try again",
			m.Name, m.Generation, r.GetGeneration())
	}
	return m, k, nil
}

func checkRestore(r *holdpointv1.RestoreMachineRequest) error {
	kind, err := checkpoint.ParseKind(r.GetKind())
	if err != nil {
		return err
	}
	if r.GetAsIs() && kind != checkpoint.Full {
		return errdefs.New(errdefs.Invalid, "restore: --as-is is for --full only: a restored disk is booted, and what boots has new time and entropy of its own; leave it out")
	}
	switch r.GetRoutes() {
	case "", "keep", "restore":
		return nil
	}
	return errdefs.New(errdefs.Invalid, "restore: --routes %q: use keep or restore", r.GetRoutes())
}

// PlanRestore says what Restore would do.
func (s *Service) PlanRestore(ctx context.Context, req *connect.Request[holdpointv1.RestoreMachineRequest]) (*connect.Response[holdpointv1.RestorePlan], error) {
	if err := checkRestore(req.Msg); err != nil {
		return nil, wire.Encode(err)
	}
	m, k, err := s.target(ctx, req.Msg)
	if err != nil {
		return nil, wire.Encode(err)
	}
	plan, err := s.plan(ctx, m, k, req.Msg.GetRoutes() == "restore")
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(plan), nil
}

func (s *Service) plan(ctx context.Context, m catalog.Machine, k checkpoint.Checkpoint, putBack bool) (*holdpointv1.RestorePlan, error) {
	target, err := s.View.Checkpoint(ctx, k, m)
	if err != nil {
		return nil, err
	}
	plan := &holdpointv1.RestorePlan{Machine: m.Name, Checkpoint: target}
	routes, err := s.Catalog.ListRoutes(ctx, "")
	if err != nil {
		return nil, err
	}
	var now []checkpoint.Route
	owners := map[string]string{}
	for _, r := range routes {
		if r.MachineID == m.ID {
			now = append(now, checkpoint.Route{Host: r.Host, Port: r.Port})
		} else {
			owners[r.Host] = r.Machine
		}
	}
	plan.Routes = view.Changes(restore.CompareRoutes(k.Routes, now, owners, putBack))
	list, err := s.Catalog.ListCheckpoints(ctx, m.ID)
	if err != nil {
		return nil, err
	}
	for _, other := range list {
		if other.ID == k.ID {
			break
		}
		newer, err := s.View.Checkpoint(ctx, other, m)
		if err != nil {
			return nil, err
		}
		plan.Newer = append(plan.Newer, newer)
	}
	effects, err := s.Catalog.EffectsSince(ctx, m.ID, k.CreatedAt)
	if err != nil {
		return nil, err
	}
	plan.Effects = view.Effects(effects)
	if run := s.Keeper.Run(m.ID); run != nil && keeper.State(m, run) == machine.Running {
		// A guest that does not answer is restored all the same.
		plan.Commands, err = s.Commands(ctx, run)
		plan.CommandsUnknown = err != nil
	}
	return plan, nil
}

// Restore puts the machine's disk, or the whole machine, back to a checkpoint.
func (s *Service) Restore(ctx context.Context, req *connect.Request[holdpointv1.RestoreMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	if err := checkRestore(r); err != nil {
		return nil, wire.Encode(err)
	}
	return s.Begin(ctx, r.GetRequestId(), "restore", r, admission.StoryDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		return s.restore(ctx, w, r)
	})
}

func (s *Service) restore(ctx context.Context, w *operation.Work, r *holdpointv1.RestoreMachineRequest) (*holdpointv1.OperationResult, error) {
	m, k, err := s.target(ctx, r)
	if err != nil {
		return nil, err
	}
	w.Machine(m.ID, m.Name)
	claims := []catalog.Claim{
		{Kind: catalog.MachineResource, ID: m.ID, Exclusive: true}, {Kind: catalog.CheckpointResource, ID: k.ID},
	}
	if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claims...); err != nil {
		return nil, err
	}
	if m, k, err = s.target(ctx, r); err != nil { // as it is under the lease
		return nil, err
	}
	s.StandAside(m.ID)
	s.News(w, m.ID)
	run := s.Keeper.Run(m.ID)
	state := keeper.State(m, run)
	if err := machine.Allow("restore", m.Name, state, machine.Running, machine.Paused, machine.Stopped, machine.Suspended); err != nil {
		return nil, err
	}
	putBack := r.GetRoutes() == "restore"
	plan, err := s.plan(ctx, m, k, putBack)
	if err != nil {
		return nil, err
	}
	_, open, err := s.Gates.Close(m.ID, fmt.Sprintf("machine %s is being restored", m.Name))
	if err != nil {
		return nil, err
	}
	defer open()
	request := restore.FullRequest{Host: s.Keeper, AsIs: r.GetAsIs(), DiskRequest: restore.DiskRequest{
		Operation: w.ID(), Machine: m, Target: k, Destination: s.Keeper, NoSafety: r.GetNoSafety(), PutBack: putBack,
		Paused: state == machine.Paused, WasClean: m.Exit == keeper.CleanExit, Enter: w.Enter, Note: w.Note, Progress: w.Copying,
	}}
	if run != nil {
		source := s.Keeper.Source(m.ID, run, restorePatience, w.Note)
		request.Source = source
		if !m.Spec.Raw() {
			request.Capture = source
		}
	}
	if request.Routes, err = s.Keeper.RoutesNow(ctx, m, run); err != nil {
		return nil, err
	}
	done, failure := s.restoreAs(ctx, w, r, request)
	if failure != nil && done.Generation == 0 {
		return nil, failure
	}
	result, err := s.restoreResult(ctx, m.ID, k, plan, done, putBack)
	if err != nil {
		return nil, err
	}
	return result, failure
}

// restoreAs does what was asked for: the disk, or the whole machine.
func (s *Service) restoreAs(ctx context.Context, w *operation.Work, r *holdpointv1.RestoreMachineRequest, request restore.FullRequest) (restore.FullResult, error) {
	needed := request.Target.Layers
	if r.GetKind() == string(checkpoint.Full) {
		needed = proof.LayersOf(request.Target)
	}
	if r.GetKind() == string(request.Target.Kind) { // else what failed may not be needed
		s.warn(w, request.Target)
	}
	if err := s.Prover.Trust(ctx, request.Target, needed...); err != nil {
		return restore.FullResult{}, fmt.Errorf("restore machine %s: %w", request.Machine.Name, err)
	}
	if r.GetKind() == string(checkpoint.Full) {
		return s.Restorer.Full(ctx, request)
	}
	layers, err := s.Catalog.GetLayers(ctx, request.Target.Layers...)
	if err != nil {
		return restore.FullResult{}, err
	}
	if err := s.CheckBoots(ctx, request.Target.ImageBuildID, layers, "checkpoint "+request.Target.ID+" could not boot"); err != nil {
		return restore.FullResult{}, err
	}
	done, err := s.Restorer.Disk(ctx, request.DiskRequest)
	return restore.FullResult{DiskResult: done}, err
}

// restoreResult says what a restore did, with the command that undoes it.
func (s *Service) restoreResult(ctx context.Context, machineID string, k checkpoint.Checkpoint, plan *holdpointv1.RestorePlan, done restore.FullResult, putBack bool) (*holdpointv1.OperationResult, error) {
	result, err := s.View.MachineResult(ctx, machineID)
	if err != nil {
		return nil, err
	}
	out := &holdpointv1.RestoreResult{
		Plan: plan, Generation: done.Generation, DowntimeMs: admission.Milliseconds(done.Downtime),
		RunningMs: admission.Milliseconds(done.Running), AnswerMs: admission.Milliseconds(done.Answer),
		ClosedSockets: uint32(done.ClosedSockets), From: done.From,
	}
	if out.Restored, err = s.View.CheckpointNow(ctx, k); err != nil {
		return nil, err
	}
	if done.Safety != nil {
		if err := s.Capturer.Settle(ctx, *done.Safety); err != nil {
			s.Log.Warn("measure sealed layers", "checkpoint", done.Safety.ID, "error", err)
		}
		if out.Safety, err = s.View.CheckpointNow(ctx, *done.Safety); err != nil {
			return nil, err
		}
		out.UndoCommand = fmt.Sprintf("holdpoint restore %s %s --%s --yes", result.GetMachine().GetName(), done.Safety.ID, done.Safety.Kind)
		if putBack {
			out.UndoCommand += " --routes=restore"
		}
	}
	result.Restore, result.Routes = out, result.GetMachine().GetRoutes()
	return result, nil
}
