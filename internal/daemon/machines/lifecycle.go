//go:build linux

package machines

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// stopPatience is how long a guest may take to shut down where nobody says.
const stopPatience = 60 * time.Second

// onMachine is a request for one machine.
type onMachine interface {
	proto.Message
	GetMachine() string
}

// List gives all machines by name.
func (s *Service) List(ctx context.Context, _ *connect.Request[holdpointv1.ListMachinesRequest]) (*connect.Response[holdpointv1.ListMachinesResponse], error) {
	machines, err := s.Catalog.ListMachines(ctx)
	if err != nil {
		return nil, wire.Encode(err)
	}
	out := &holdpointv1.ListMachinesResponse{}
	for _, m := range machines {
		view, err := s.View.Machine(ctx, m)
		if err != nil {
			return nil, wire.Encode(err)
		}
		out.Machines = append(out.Machines, view)
	}
	return connect.NewResponse(out), nil
}

// Get gives one machine.
func (s *Service) Get(ctx context.Context, req *connect.Request[holdpointv1.GetMachineRequest]) (*connect.Response[holdpointv1.Machine], error) {
	m, err := s.Catalog.ResolveMachine(ctx, req.Msg.GetMachine())
	if err != nil {
		return nil, wire.Encode(err)
	}
	view, err := s.View.Machine(ctx, m)
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(view), nil
}

// on runs a verb on one machine that is held for it, and answers with the
// machine; allowed are the states the verb may begin in.
func (s *Service) on(ctx context.Context, requestID, verb string, options onMachine, allowed []machine.State,
	act func(ctx context.Context, w *operation.Work, m catalog.Machine) error,
) (*connect.Response[holdpointv1.Operation], error) {
	return s.Begin(ctx, requestID, verb, options, admission.BootDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		return s.holding(ctx, w, verb, options.GetMachine(), allowed, act)
	})
}

// holding holds a machine for what is done with it in an operation of that verb.
func (s *Service) holding(ctx context.Context, w *operation.Work, verb, ref string, allowed []machine.State,
	act func(ctx context.Context, w *operation.Work, m catalog.Machine) error,
) (*holdpointv1.OperationResult, error) {
	m, err := s.Claim(ctx, w, ref)
	if err != nil {
		return nil, err
	}
	if err := machine.Allow(verb, m.Name, keeper.State(m, s.Keeper.Run(m.ID)), allowed...); err != nil {
		return nil, err
	}
	if err := act(ctx, w, m); err != nil {
		return nil, err
	}
	result, err := s.View.MachineResult(ctx, m.ID)
	if err == nil && m.RemoveOnStop && result.GetMachine().GetState() == string(machine.Stopped) {
		checkpoints, err := s.Catalog.ListCheckpoints(ctx, m.ID)
		if err == nil {
			err = s.drop(ctx, w, m, checkpoints)
		}
		if err != nil {
			w.Note("machine %s is not removed yet: %v", m.Name, err) // Reap tries again
		}
	}
	return result, err
}

// Start boots a stopped machine.
func (s *Service) Start(ctx context.Context, req *connect.Request[holdpointv1.StartMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return s.on(ctx, r.GetRequestId(), "start", r, []machine.State{machine.Stopped}, s.start)
}

func (s *Service) start(ctx context.Context, w *operation.Work, m catalog.Machine) error {
	if err := s.Prover.TrustDisk(ctx, m); err != nil {
		return fmt.Errorf("start machine %s: %w", m.Name, err)
	}
	if err := w.Enter(ctx, phaseBoot, "booting the guest", Detail{MachineID: m.ID}); err != nil {
		return err
	}
	note, err := s.Keeper.Boot(ctx, m.ID)
	if note != "" {
		w.Note("%s", note)
	}
	return err
}

// Stop asks the guest to shut down, or ends its run. One that is started again by
// itself is put to rest, also where it has just ended or is being started.
func (s *Service) Stop(ctx context.Context, req *connect.Request[holdpointv1.StopMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	allowed := []machine.State{machine.Running}
	if r.GetForce() {
		allowed = append(allowed, machine.Paused, machine.Unknown)
	}
	return s.Begin(ctx, r.GetRequestId(), "stop", r, admission.BootDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		rested, err := s.rest(ctx, r.GetMachine())
		if err != nil {
			return nil, err
		}
		if rested {
			allowed = append(allowed, machine.Stopped)
		}
		return s.holding(ctx, w, "stop", r.GetMachine(), allowed, func(ctx context.Context, w *operation.Work, m catalog.Machine) error {
			if rested && keeper.State(m, s.Keeper.Run(m.ID)) == machine.Stopped {
				w.Note("machine %s had ended; it is not started again by itself", m.Name)
				return nil
			}
			return s.stop(ctx, w, m, r)
		})
	})
}

// rest puts a machine to rest that is about to be started again by itself.
func (s *Service) rest(ctx context.Context, ref string) (bool, error) {
	m, err := s.Catalog.ResolveMachine(ctx, ref)
	if err != nil {
		return false, nil // who claims it tells
	}
	return s.Rest(ctx, m)
}

func (s *Service) stop(ctx context.Context, w *operation.Work, m catalog.Machine, r *holdpointv1.StopMachineRequest) error {
	if err := w.Enter(ctx, "stop", "stopping the guest", Detail{MachineID: m.ID}); err != nil {
		return err
	}
	run := s.Keeper.Run(m.ID)
	if run == nil {
		return errdefs.New(errdefs.WrongState, "stop: machine %s has no run here; run holdpoint daemon stop and try again", m.Name)
	}
	defer s.Keeper.Tidy(m.ID)
	// First: a daemon that dies over it must not start the machine again.
	if err := s.Catalog.PutToRest(ctx, m.ID); err != nil {
		return err
	}
	if r.GetForce() {
		return run.Kill(ctx)
	}
	patience := stopPatience
	if r.GetTimeoutMillis() > 0 {
		patience = time.Duration(r.GetTimeoutMillis()) * time.Millisecond
	}
	clean, err := run.Stop(ctx, patience)
	if err != nil {
		return fmt.Errorf("stop machine %s: %w; give it longer with --timeout, or end it as a power cut would with holdpoint stop --force %s", m.Name, err, m.Name)
	}
	if !clean {
		w.Note("the guest ended without a clean shutdown")
	}
	return nil
}

// Pause stops the machine's CPUs.
func (s *Service) Pause(ctx context.Context, req *connect.Request[holdpointv1.PauseMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.on(ctx, req.Msg.GetRequestId(), "pause", req.Msg, []machine.State{machine.Running}, func(ctx context.Context, w *operation.Work, m catalog.Machine) error {
		return s.Keeper.SetPaused(ctx, m, true)
	})
}

// Remove deletes a machine with its checkpoints.
func (s *Service) Remove(ctx context.Context, req *connect.Request[holdpointv1.RemoveMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return s.Begin(ctx, r.GetRequestId(), "rm", r, admission.BootDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		if r.GetForce() {
			if _, err := s.rest(ctx, r.GetMachine()); err != nil {
				return nil, err
			}
		}
		return s.remove(ctx, w, r)
	})
}

// remove removes a machine and gives it as it was.
func (s *Service) remove(ctx context.Context, w *operation.Work, r *holdpointv1.RemoveMachineRequest) (*holdpointv1.OperationResult, error) {
	m, err := s.Claim(ctx, w, r.GetMachine())
	if err != nil {
		return nil, err
	}
	state := keeper.State(m, s.Keeper.Run(m.ID))
	if state != machine.Stopped && state != machine.Suspended && !r.GetForce() {
		remedy := ""
		if state == machine.Running {
			remedy = fmt.Sprintf("holdpoint stop %s first, or ", m.Name)
		}
		return nil, errdefs.New(errdefs.WrongState, "rm: machine %s is %s; run %sholdpoint rm --force %s", m.Name, state, remedy, m.Name)
	}
	checkpoints, err := s.Catalog.ListCheckpoints(ctx, m.ID)
	if err != nil {
		return nil, err
	}
	if len(checkpoints) > 0 && !r.GetForce() {
		return nil, errdefs.New(errdefs.Referenced, "rm: machine %s has checkpoints (%d) that would go with it; see holdpoint checkpoint ls %s, or remove it with them by holdpoint rm --force %s",
			m.Name, len(checkpoints), m.Name, m.Name)
	}
	was, err := s.View.Machine(ctx, m)
	if err != nil {
		return nil, err
	}
	if err := s.drop(ctx, w, m, checkpoints); err != nil {
		return nil, err
	}
	return &holdpointv1.OperationResult{Machine: was, RemovedCheckpoints: uint32(len(checkpoints))}, nil
}

// drop ends a machine and removes it with its checkpoints. It keeps all others
// from those first, so that it is not ended and then cannot be removed because
// somebody makes a fork.
func (s *Service) drop(ctx context.Context, w *operation.Work, m catalog.Machine, checkpoints []checkpoint.Checkpoint) error {
	s.StandAside(m.ID)
	claims := make([]catalog.Claim, len(checkpoints))
	for i, k := range checkpoints {
		// A pool that is being filled holds the checkpoint: end that first.
		if err := s.Pools.End(ctx, k.ID); err != nil {
			return err
		}
		claims[i] = catalog.Claim{Kind: catalog.CheckpointResource, ID: k.ID, Exclusive: true}
	}
	if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claims...); err != nil {
		return fmt.Errorf("rm: machine %s stays as it is: %w", m.Name, err)
	}
	if err := w.Enter(ctx, "remove", "removing the machine", Detail{MachineID: m.ID}); err != nil {
		return err
	}
	return s.Keeper.Drop(ctx, w.ID(), m)
}
