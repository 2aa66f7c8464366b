//go:build linux

package checkpoints

import (
	"context"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// stopPatience is how long a guest may take to shut down.
const stopPatience = 60 * time.Second

// maxMessage bounds a checkpoint's message, in bytes.
const maxMessage = 16 << 10

// Create takes a checkpoint.
func (s *Service) Create(ctx context.Context, req *connect.Request[holdpointv1.CreateCheckpointRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	if err := s.checkLive(ctx, r); err != nil {
		return nil, wire.Encode(err)
	}
	if err := checkCreate(r); err != nil {
		return nil, wire.Encode(err)
	}
	create := s.createDisk
	if r.GetKind() == string(checkpoint.Full) {
		create = s.createFull
	}
	return s.Begin(ctx, r.GetRequestId(), "checkpoint create", r, admission.StoryDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		return create(ctx, w, r)
	})
}

// checkLive refuses what cannot be kept of the machine while it runs. What is
// wrong with the machine's name is told by the operation.
func (s *Service) checkLive(ctx context.Context, r *holdpointv1.CreateCheckpointRequest) error {
	m, err := s.Catalog.ResolveMachine(ctx, r.GetMachine())
	if err != nil || r.GetKind() != string(checkpoint.Full) && modeOf(r, keeper.State(m, s.Keeper.Run(m.ID))) != checkpoint.Frozen {
		return nil
	}
	return m.Spec.CheckLive("checkpoint create", m.Name)
}

func checkCreate(r *holdpointv1.CreateCheckpointRequest) error {
	if r.GetName() != "" {
		if err := machine.CheckName("checkpoint", r.GetName()); err != nil {
			return err
		}
	}
	kind, err := checkpoint.ParseKind(r.GetKind())
	switch {
	case err != nil:
		return err
	case len(r.GetMessage()) > maxMessage:
		return errdefs.New(errdefs.Invalid, "checkpoint create: the message has %d bytes, at most %d", len(r.GetMessage()), maxMessage)
	case kind == checkpoint.Full && r.GetMode() != "":
		return errdefs.New(errdefs.Invalid, "checkpoint create: mode %q is one of disk checkpoints; add --kind disk, or leave it away", r.GetMode())
	case kind == checkpoint.Full:
		return nil
	case r.GetMode() != "" && r.GetMode() != string(checkpoint.Frozen) && r.GetMode() != string(checkpoint.Stopped):
		return errdefs.New(errdefs.Invalid, "checkpoint create: mode %q: use frozen or stopped", r.GetMode())
	}
	return checkFreeze(r)
}

// modeOf is the mode of a disk checkpoint of a machine that is in that state.
func modeOf(r *holdpointv1.CreateCheckpointRequest, state machine.State) checkpoint.Consistency {
	switch {
	case r.GetMode() != "":
		return checkpoint.Consistency(r.GetMode())
	case state == machine.Stopped:
		return checkpoint.Stopped
	}
	return checkpoint.Frozen
}

// createDisk takes a disk checkpoint of the mode that fits the machine's state.
func (s *Service) createDisk(ctx context.Context, w *operation.Work, r *holdpointv1.CreateCheckpointRequest) (*holdpointv1.OperationResult, error) {
	m, err := s.Claim(ctx, w, r.GetMachine())
	if err != nil {
		return nil, err
	}
	run := s.Keeper.Run(m.ID)
	if modeOf(r, keeper.State(m, run)) == checkpoint.Frozen {
		return s.createFrozen(ctx, w, r, m, run)
	}
	return s.createStopped(ctx, w, r, m, run)
}

func (s *Service) createStopped(ctx context.Context, w *operation.Work, r *holdpointv1.CreateCheckpointRequest, m catalog.Machine, run *fleet.Run) (*holdpointv1.OperationResult, error) {
	if err := machine.Allow("checkpoint create", m.Name, keeper.State(m, run), machine.Running, machine.Stopped); err != nil {
		return nil, err
	}
	if err := s.Catalog.CheckpointNameFree(ctx, m, r.GetName()); err != nil {
		return nil, err
	}
	if err := s.Prover.TrustDisk(ctx, m); err != nil {
		return nil, fmt.Errorf("machine %s could not boot again: %w", m.Name, err)
	}
	chain, err := s.Catalog.Chain(ctx, m.ID)
	if err != nil {
		return nil, err
	}
	if err := s.CheckBoots(ctx, m.ImageBuildID, chain, "machine "+m.Name+" could not boot again"); err != nil {
		return nil, err
	}
	active, open, err := s.Gates.Close(m.ID, fmt.Sprintf("a checkpoint of %s is being taken", m.Name))
	if err != nil {
		return nil, err
	}
	defer open()
	routes, err := s.Keeper.RoutesNow(ctx, m, run)
	if err != nil {
		return nil, err
	}
	request := capture.StoppedRequest{
		Operation: w.ID(), Machine: m, Progress: w.Progress,
		Checkpoint: checkpoint.Checkpoint{ID: durable.NewID(), Name: r.GetName(), Message: r.GetMessage(), Routes: routes},
		WasClean:   m.Exit == keeper.CleanExit, AllowCrash: r.GetAllowCrash(), Enter: w.Enter,
	}
	if run != nil {
		if err := s.checkQuiet(ctx, m, run, active, r.GetStopRunning()); err != nil {
			return nil, err
		}
		request.Source = s.Keeper.Source(m.ID, run, stopPatience, w.Note)
	}
	result, failure := s.Capturer.Stopped(ctx, request)
	if failure != nil && result.Checkpoint.ID == "" {
		return nil, failure
	}
	if err := s.Capturer.Settle(ctx, result.Checkpoint); err != nil {
		s.Log.Warn("measure sealed layers", "checkpoint", result.Checkpoint.ID, "error", err)
	}
	view, err := s.View.CheckpointNow(ctx, result.Checkpoint)
	if err != nil {
		return nil, err
	}
	return &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{
		Checkpoint: view, DurableMs: admission.Milliseconds(result.Durable), ReturnMs: admission.Milliseconds(result.Return),
		DowntimeMs: admission.Milliseconds(result.Stop + result.Copy + result.Boot), StopMs: admission.Milliseconds(result.Stop), CopyMs: admission.Milliseconds(result.Copy), BootMs: admission.Milliseconds(result.Boot),
		DiskBytes: result.Checkpoint.DiskBytes, DiskCopy: string(result.Way),
	}}, failure
}

// checkQuiet refuses to end commands and copies that nobody agreed to end.
func (s *Service) checkQuiet(ctx context.Context, m catalog.Machine, run *fleet.Run, active []hold.Effect, agreed bool) error {
	if agreed {
		return nil
	}
	busy, err := s.Commands(ctx, run)
	if err != nil {
		return fmt.Errorf("checkpoint create: ask machine %s what runs in it: %w", m.Name, err)
	}
	for _, effect := range active {
		if effect.Door == hold.Copy {
			busy = append(busy, effect.What)
		}
	}
	if len(busy) == 0 {
		return nil
	}
	return errdefs.New(errdefs.MachineBusy, "checkpoint create: a stopped checkpoint would end what runs in machine %s (%s); wait for it or use --stop-running",
		m.Name, strings.Join(busy, ", "))
}
