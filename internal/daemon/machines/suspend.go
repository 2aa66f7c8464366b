//go:build linux

package machines

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/proof"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// Suspend takes a full checkpoint and ends the machine's run.
func (s *Service) Suspend(ctx context.Context, req *connect.Request[holdpointv1.SuspendMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return s.Begin(ctx, r.GetRequestId(), "suspend", r, admission.StoryDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		return s.suspend(ctx, w, r.GetMachine(), false)
	})
}

// SuspendIdle suspends a machine unless it is used by now, and returns when
// that is done.
func (s *Service) SuspendIdle(ctx context.Context, machineID string) error {
	return s.Engine.Run(ctx, operation.Request{Verb: "suspend", Options: &holdpointv1.SuspendMachineRequest{Machine: machineID}, Timeout: admission.StoryDeadline},
		func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
			return s.suspend(ctx, w, machineID, true)
		})
}

// suspend takes the checkpoint with the gate closed: what came through it
// after the checkpoint would be lost. idle refuses a machine that is used.
func (s *Service) suspend(ctx context.Context, w *operation.Work, ref string, idle bool) (*holdpointv1.OperationResult, error) {
	m, err := s.Claim(ctx, w, ref)
	if err != nil {
		return nil, err
	}
	run := s.Keeper.Run(m.ID)
	state := keeper.State(m, run)
	if state == machine.Suspended {
		return s.suspended(ctx, m.ID, nil)
	}
	if err := m.Spec.CheckLive("suspend", m.Name); err != nil {
		return nil, err
	}
	if err := machine.Allow("suspend", m.Name, state, machine.Running, machine.Paused); err != nil {
		return nil, err
	}
	if err := s.Prover.TrustDisk(ctx, m); err != nil {
		return nil, fmt.Errorf("suspend: machine %s could not be resumed, and runs on: %w", m.Name, err)
	}
	active, open, err := s.Gates.Close(m.ID, "machine "+m.Name+" is being suspended")
	if err != nil {
		return nil, err
	}
	defer open()
	if idle && len(active) > 0 {
		return nil, errdefs.New(errdefs.MachineBusy, "suspend: machine %s is used (%s)", m.Name, active[0].What)
	}
	routes, err := s.Keeper.RoutesNow(ctx, m, run)
	if err != nil {
		return nil, err
	}
	defer s.Keeper.DecideEnd(m.ID)()
	source, began := s.Keeper.Source(m.ID, run, stopPatience, w.Note), false
	result, failure := s.Restorer.Suspend(ctx, restore.SuspendRequest{
		Checkpoint: capture.FullRequest{
			Operation: w.ID(), Machine: m, Source: source, Note: w.Note,
			Enter: func(ctx context.Context, phase, text string, detail any) error {
				began = true
				return w.Enter(ctx, phase, text, detail)
			},
			Checkpoint: checkpoint.Checkpoint{ID: durable.NewID(), Message: "suspended", Automatic: true, Routes: routes},
		},
		Run: source, Paused: state == machine.Paused,
	})
	if failure != nil && began {
		failure = fmt.Errorf("%w; %s", failure, s.notSuspended(ctx, m, run, errdefs.KindOf(failure)))
	}
	if failure != nil && result.Checkpoint.ID == "" {
		return nil, failure
	}
	s.Keeper.Tidy(m.ID)
	if err := s.Capturer.Settle(ctx, result.Checkpoint); err != nil {
		s.Log.Warn("measure sealed layers", "checkpoint", result.Checkpoint.ID, "error", err)
	}
	shown, err := s.suspended(ctx, m.ID, admission.FullResult(result))
	if failure == nil {
		failure = err
	}
	return shown, failure
}

// lookTimeout bounds the look at a machine after a suspension that failed: a
// monitor that died over it has a successor in less than a second.
const lookTimeout = 10 * time.Second

// endPatience is how long a monitor may take to tell of the end of its run.
const endPatience = 2 * time.Second

// notSuspended says in what state a suspension that failed has left the machine,
// and what to do.
func (s *Service) notSuspended(ctx context.Context, m catalog.Machine, run *fleet.Run, why errdefs.Kind) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTimeout)
	defer cancel()
	if why == errdefs.WrongState { // its process is gone, and its monitor is about to say so
		ending, cancel := context.WithTimeout(ctx, endPatience)
		_ = run.AwaitEnd(ending)
		cancel()
	}
	_, err := run.StatusNow(ctx)
	now, lost := s.Catalog.GetMachine(ctx, m.ID)
	state := keeper.State(now, run)
	again := fmt.Sprintf(": try again with holdpoint suspend %s", m.Name)
	if why == errdefs.Unsupported || why == errdefs.NoSpace {
		again = "" // not before that is mended
	}
	switch {
	case lost == nil && now.State == machine.Suspended:
		return fmt.Sprintf("machine %s is suspended all the same: go on with holdpoint resume %s", m.Name, m.Name)
	case run.Ended():
		return fmt.Sprintf("machine %s has stopped: start it with holdpoint start %s", m.Name, m.Name)
	case err != nil || lost != nil || state == machine.Unknown:
		return fmt.Sprintf("what machine %s does is not known: look at holdpoint inspect %s, or end it with holdpoint stop --force %s", m.Name, m.Name, m.Name)
	case state == machine.Paused:
		return fmt.Sprintf("machine %s is paused as before%s", m.Name, again)
	}
	return fmt.Sprintf("machine %s runs on%s", m.Name, again)
}

// suspended is the outcome of a suspension: the machine and its head.
func (s *Service) suspended(ctx context.Context, machineID string, took *holdpointv1.CheckpointResult) (*holdpointv1.OperationResult, error) {
	result, err := s.View.MachineResult(ctx, machineID)
	if err != nil || result.GetMachine().GetHead() == "" {
		return result, err
	}
	head, err := s.Catalog.GetCheckpoint(ctx, result.GetMachine().GetHead())
	if err != nil {
		return result, err
	}
	if took == nil {
		took = &holdpointv1.CheckpointResult{DiskBytes: head.DiskBytes}
		if head.Full != nil {
			took.MemoryBytes = head.Full.MemoryBytes
		}
	}
	took.Checkpoint, err = s.View.CheckpointNow(ctx, head)
	result.Checkpoint = took
	return result, err
}

// Resume lets the CPUs of a paused machine go on, or a suspended machine from
// its head.
func (s *Service) Resume(ctx context.Context, req *connect.Request[holdpointv1.ResumeMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return s.on(ctx, r.GetRequestId(), "resume", r, []machine.State{machine.Paused, machine.Suspended}, s.resume)
}

// ResumeAsleep resumes a machine that is suspended, and returns when it runs. If another
// operation does that, or has done it, that is as good.
func (s *Service) ResumeAsleep(ctx context.Context, machineID string) error {
	for {
		m, err := s.Catalog.GetMachine(ctx, machineID)
		if err != nil || m.State != machine.Suspended {
			return err
		}
		if m.HeldBy != "" {
			if _, err := s.Engine.Wait(ctx, m.HeldBy); err != nil {
				return err
			}
			continue
		}
		err = s.Engine.Run(ctx, operation.Request{Verb: "resume", Options: &holdpointv1.ResumeMachineRequest{Machine: machineID}, Timeout: admission.StoryDeadline},
			func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
				m, err := s.Claim(ctx, w, machineID)
				if err == nil && keeper.State(m, s.Keeper.Run(m.ID)) == machine.Suspended {
					err = s.resume(ctx, w, m)
				}
				if err != nil {
					return nil, err
				}
				return s.View.MachineResult(ctx, m.ID)
			})
		if !errdefs.Is(err, errdefs.MachineBusy) {
			return err
		}
	}
}

func (s *Service) resume(ctx context.Context, w *operation.Work, m catalog.Machine) error {
	if m.State != machine.Suspended {
		return s.Keeper.SetPaused(ctx, m, false)
	}
	head, err := s.Catalog.GetCheckpoint(ctx, m.Head)
	if err != nil {
		return err
	}
	if err := s.Prover.Trust(ctx, head, proof.LayersOf(head)...); err != nil {
		return fmt.Errorf("resume machine %s: %w, and restore it: holdpoint checkpoint ls %s", m.Name, err, m.Name)
	}
	defer s.Keeper.DecideEnd(m.ID)()
	begun, err := s.Restorer.Resume(ctx, restore.ResumeRequest{
		Operation: w.ID(), Machine: m, Destination: s.Keeper, Host: s.Keeper, Enter: w.Enter, Note: w.Note,
	})
	if err == nil {
		tellClosed(w, m, begun.ClosedSockets)
	}
	return err
}
