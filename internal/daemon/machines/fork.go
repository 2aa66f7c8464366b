//go:build linux

package machines

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/proof"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// maxForks bounds the machines of one fork.
const maxForks = 256

// PhaseFork is the phase of a fork that makes machines, in the journal; those
// before it are of the checkpoint that is taken first.
const PhaseFork = "fork"

// Fork makes new machines from a checkpoint.
func (s *Service) Fork(ctx context.Context, req *connect.Request[holdpointv1.ForkRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	if err := checkFork(r); err != nil {
		return nil, wire.Encode(err)
	}
	return s.Begin(ctx, r.GetRequestId(), "fork", r, admission.StoryDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		return s.fork(ctx, w, r)
	})
}

func checkFork(r *holdpointv1.ForkRequest) error {
	switch {
	case r.GetCheckpoint() == "" && r.GetMachine() == "":
		return errdefs.New(errdefs.Invalid, "fork: name a checkpoint, or a machine with --machine")
	case r.GetCount() > maxForks:
		return errdefs.New(errdefs.Invalid, "fork: %d machines: at most %d at once", r.GetCount(), maxForks)
	case r.GetName() == "":
		return nil
	}
	return machine.CheckName("machine", childName(r.GetName(), max(int(r.GetCount()), 1)))
}

func childName(base string, index int) string { return fmt.Sprintf("%s-%d", base, index) }

// child is one machine that a fork makes.
type child struct {
	machine catalog.Machine
	result  *holdpointv1.ForkResult
}

func (s *Service) fork(ctx context.Context, w *operation.Work, r *holdpointv1.ForkRequest) (*holdpointv1.OperationResult, error) {
	k, taken, err := s.forkTarget(ctx, w, r)
	if err != nil {
		return nil, err
	}
	claim := catalog.Claim{Kind: catalog.CheckpointResource, ID: k.ID}
	if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claim); err != nil {
		return nil, err
	}
	s.warn(w, k)
	if err := s.Prover.Trust(ctx, k, proof.LayersOf(k)...); err != nil {
		return nil, fmt.Errorf("fork: %w", err)
	}
	children, err := s.children(ctx, w, r, k)
	if err != nil {
		return nil, err
	}
	detail := restore.ForkDetail{Checkpoint: k.ID}
	for _, c := range children {
		detail.Children = append(detail.Children, restore.Child{MachineID: c.machine.ID, Name: c.machine.Name})
	}
	if err := w.Enter(ctx, PhaseFork, fmt.Sprintf("making %d machines", len(children)), detail); err != nil {
		return nil, err
	}
	if err := s.checkRoom(ctx, k, len(children)); err != nil {
		return nil, err
	}
	s.bearAll(ctx, w, r, k, children, &operation.Copies{Count: len(children), Show: w.Copying})
	result := &holdpointv1.OperationResult{Checkpoint: taken}
	for _, c := range children {
		result.Forks = append(result.Forks, c.result)
	}
	return result, nil
}

// warn tells of a checkpoint that failed verification.
func (s *Service) warn(w *operation.Work, k checkpoint.Checkpoint) {
	if k.Verification == checkpoint.Failed {
		w.Note("%s", proof.Warning(k, k.Problem))
	}
}

// forkTarget is the checkpoint that is asked for, or of a machine that goes on
// one that is taken now. Its machine is free again after that.
func (s *Service) forkTarget(ctx context.Context, w *operation.Work, r *holdpointv1.ForkRequest) (k checkpoint.Checkpoint, taken *holdpointv1.CheckpointResult, err error) {
	if r.GetCheckpoint() != "" {
		k, err = s.Checkpoint(ctx, r.GetMachine(), r.GetCheckpoint())
		if err != nil {
			return k, nil, err
		}
		if m, err := s.Catalog.GetMachine(ctx, k.MachineID); err == nil {
			w.Machine(m.ID, m.Name)
		}
		return k, nil, s.Catalog.UseCheckpoint(ctx, k.MachineID, k.ID)
	}
	m, err := s.Claim(ctx, w, r.GetMachine())
	if err != nil {
		return k, nil, err
	}
	if err := m.Spec.CheckLive("fork", m.Name); err != nil {
		return k, nil, err
	}
	run := s.Keeper.Run(m.ID)
	switch state := keeper.State(m, run); state {
	case machine.Suspended:
		k, err = s.Catalog.GetCheckpoint(ctx, m.Head)
	case machine.Running, machine.Paused:
		k, taken, err = s.forkPoint(ctx, w, m)
	default:
		err = errdefs.New(errdefs.WrongState, "fork: machine %s is %s; start it, or name one of its checkpoints: holdpoint checkpoint ls %s", m.Name, state, m.Name)
	}
	if err != nil {
		return k, nil, err
	}
	claim := catalog.Claim{Kind: catalog.CheckpointResource, ID: k.ID}
	if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claim); err != nil {
		return k, nil, err
	}
	return k, taken, s.Catalog.Release(ctx, w.ID(), catalog.Claim{Kind: catalog.MachineResource, ID: m.ID})
}

// forkPoint takes the checkpoint that machines of a running one begin from.
func (s *Service) forkPoint(ctx context.Context, w *operation.Work, m catalog.Machine) (checkpoint.Checkpoint, *holdpointv1.CheckpointResult, error) {
	run := s.Keeper.Run(m.ID)
	routes, err := s.Keeper.RoutesNow(ctx, m, run)
	if err != nil {
		return checkpoint.Checkpoint{}, nil, err
	}
	result, err := s.Capturer.Full(ctx, capture.FullRequest{
		Operation: w.ID(), Machine: m, Source: s.Keeper.Source(m.ID, run, stopPatience, w.Note), Enter: w.Enter, Note: w.Note,
		Checkpoint: checkpoint.Checkpoint{ID: durable.NewID(), Automatic: true, Message: "before fork", Routes: routes},
	})
	if err != nil {
		return result.Checkpoint, nil, err
	}
	if err := s.Capturer.Settle(ctx, result.Checkpoint); err != nil {
		s.Log.Warn("measure sealed layers", "checkpoint", result.Checkpoint.ID, "error", err)
	}
	taken := admission.FullResult(result)
	taken.Checkpoint, err = s.View.CheckpointNow(ctx, result.Checkpoint)
	return result.Checkpoint, taken, err
}

// children names the machines of a fork. Those whose name is taken are there
// with that error.
func (s *Service) children(ctx context.Context, w *operation.Work, r *holdpointv1.ForkRequest, k checkpoint.Checkpoint) ([]*child, error) {
	count := max(int(r.GetCount()), 1)
	machines, err := s.Catalog.ListMachines(ctx)
	if err != nil {
		return nil, err
	}
	taken := map[string]bool{}
	source := "fork"
	for _, m := range machines {
		taken[m.Name] = true
		if m.ID == k.MachineID {
			source = m.Name
		}
	}
	base := r.GetName()
	if base == "" {
		base = freeBase(source, w.ID(), count, taken)
	}
	var children []*child
	for i := 1; i <= count; i++ {
		m := newMachine(childName(base, i))
		m.RemoveOnStop = r.GetRemoveOnStop()
		c := &child{machine: m, result: &holdpointv1.ForkResult{Name: m.Name, Index: uint32(i)}}
		if taken[m.Name] {
			c.fail(errdefs.New(errdefs.AlreadyExists, "fork: a machine %s exists; choose another --name, or remove it, with its checkpoints, with holdpoint rm --force %s", m.Name, m.Name))
		}
		children = append(children, c)
	}
	return children, nil
}

// freeBase is a name whose numbered ones are free: the source's own, or with
// something of the operation's id.
func freeBase(source, operationID string, count int, taken map[string]bool) string {
	const room = 63 - len("-0123-256")
	base := source[:min(len(source), room)]
	for i := 1; i <= count; i++ {
		if taken[childName(base, i)] {
			return base + "-" + operationID[:4]
		}
	}
	return base
}

func (c *child) fail(err error) {
	c.result.Error = &holdpointv1.ErrorInfo{Kind: string(errdefs.KindOf(err)), Message: err.Error()}
}

// bearAll makes the children, as many at a time as the host has CPUs.
func (s *Service) bearAll(ctx context.Context, w *operation.Work, r *holdpointv1.ForkRequest, k checkpoint.Checkpoint, children []*child, copied *operation.Copies) {
	turn := make(chan struct{}, runtime.NumCPU())
	var wg sync.WaitGroup
	for _, c := range children {
		if c.result.GetError() != nil {
			continue
		}
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			if err := s.bear(ctx, w, r, k, c, copied.Next()); err != nil {
				c.fail(err)
			}
		})
	}
	wg.Wait()
}

// bear makes one child.
func (s *Service) bear(ctx context.Context, w *operation.Work, r *holdpointv1.ForkRequest, k checkpoint.Checkpoint, c *child, progress func(done, total int64)) error {
	began := time.Now()
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	claim := catalog.Claim{Kind: catalog.MachineResource, ID: c.machine.ID, Exclusive: true}
	if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claim); err != nil {
		return err
	}
	made, err := s.Restorer.Fork(ctx, restore.ForkRequest{
		Operation: w.ID(), Target: k, Machine: c.machine, Destination: s.Keeper, Host: s.Keeper, AsIs: r.GetAsIs(), Note: w.Note, Progress: progress,
	})
	released := s.Catalog.Release(context.WithoutCancel(ctx), w.ID(), claim)
	if err != nil {
		return err
	}
	if released != nil {
		s.Log.Warn("release a new machine", "machine", c.machine.Name, "error", released)
	}
	tellClosed(w, c.machine, made.ClosedSockets)
	c.result.ReadyMs = admission.Milliseconds(time.Since(began))
	c.result.Machine, err = s.View.Machine(ctx, made.Machine)
	if c.result.GetMachine() != nil {
		c.result.Machine.Operation = ""
	}
	return err
}
