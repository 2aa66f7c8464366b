//go:build linux

package daemon

import (
	"context"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// factsTimeout bounds the question what listens in the guest; a checkpoint
// does without an answer.
const factsTimeout = 5 * time.Second

// maxMessage bounds a checkpoint's message, in bytes.
const maxMessage = 16 << 10

// checkpointAPI serves CheckpointService.
type checkpointAPI struct {
	*Daemon
	holdpointv1connect.UnimplementedCheckpointServiceHandler
}

// Create takes a checkpoint.
func (d checkpointAPI) Create(ctx context.Context, req *connect.Request[holdpointv1.CreateCheckpointRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	if err := checkCreate(r); err != nil {
		return nil, wire.Encode(err)
	}
	return d.begin(ctx, r.GetRequestId(), "checkpoint create", r, storyDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		return d.create(ctx, w, r)
	})
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
	case kind == checkpoint.Full:
		return errdefs.New(errdefs.Unsupported, "checkpoint create: full checkpoints, the default, are not there yet; type: holdpoint checkpoint create %s --kind disk --mode stopped", r.GetMachine())
	case r.GetMode() == string(checkpoint.Frozen):
		return errdefs.New(errdefs.Unsupported, "checkpoint create: frozen checkpoints, the default of a disk checkpoint, are not there yet; type: holdpoint checkpoint create %s --kind disk --mode stopped", r.GetMachine())
	case r.GetMode() != string(checkpoint.Stopped):
		return errdefs.New(errdefs.Invalid, "checkpoint create: mode %q: use stopped", r.GetMode())
	}
	return nil
}

func (d checkpointAPI) create(ctx context.Context, w *operation.Work, r *holdpointv1.CreateCheckpointRequest) (*holdpointv1.OperationResult, error) {
	m, err := d.claimMachine(ctx, w, r.GetMachine())
	if err != nil {
		return nil, err
	}
	run := d.keeper.Run(m.ID)
	if err := machine.Allow("checkpoint create", m.Name, keeper.State(m, run), machine.Running, machine.Stopped); err != nil {
		return nil, err
	}
	if err := d.catalog.CheckpointNameFree(ctx, m, r.GetName()); err != nil {
		return nil, err
	}
	chain, err := d.catalog.Chain(ctx, m.ID)
	if err != nil {
		return nil, err
	}
	if err := d.checkBoots(ctx, m.ImageBuildID, chain, "machine "+m.Name+" could not boot again"); err != nil {
		return nil, err
	}
	active, open, err := d.gates.Close(m.ID, fmt.Sprintf("a checkpoint of %s is taken", m.Name))
	if err != nil {
		return nil, err
	}
	defer open()
	routes, err := d.keeper.RoutesNow(ctx, m, run)
	if err != nil {
		return nil, err
	}
	request := capture.StoppedRequest{
		Machine:    m,
		Checkpoint: checkpoint.Checkpoint{ID: durable.NewID(), Name: r.GetName(), Message: r.GetMessage(), Routes: routes},
		WasClean:   m.Exit == keeper.CleanExit, AllowCrash: r.GetAllowCrash(), Enter: w.Enter,
	}
	if run != nil {
		if err := d.checkQuiet(ctx, m, run, active, r.GetStopRunning()); err != nil {
			return nil, err
		}
		request.Source = d.keeper.Source(m.ID, run, stopPatience, w.Note)
	}
	result, failure := d.capturer.Stopped(ctx, request)
	if failure != nil && result.Checkpoint.ID == "" {
		return nil, failure
	}
	if err := d.capturer.Settle(ctx, result.Checkpoint); err != nil {
		d.cfg.Log.Warn("measure sealed layers", "checkpoint", result.Checkpoint.ID, "error", err)
	}
	view, err := d.view.CheckpointNow(ctx, result.Checkpoint)
	if err != nil {
		return nil, err
	}
	return &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{
		Checkpoint: view, DurableMs: ms(result.Durable), ReturnMs: ms(result.Return),
		DowntimeMs: ms(result.Stop + result.Copy + result.Boot), StopMs: ms(result.Stop), CopyMs: ms(result.Copy), BootMs: ms(result.Boot),
		DiskBytes: result.Checkpoint.DiskBytes,
	}}, failure
}

func ms(t time.Duration) float64 { return float64(t.Microseconds()) / 1000 }

// checkQuiet refuses to end commands and copies that nobody agreed to end.
func (d *Daemon) checkQuiet(ctx context.Context, m catalog.Machine, run *fleet.Run, active []hold.Effect, agreed bool) error {
	if agreed {
		return nil
	}
	busy, err := d.commands(ctx, run)
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

// commands are the commands that run in the machine, for people.
func (d *Daemon) commands(ctx context.Context, run *fleet.Run) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, factsTimeout)
	defer cancel()
	list, err := run.Agent().ListCommands(ctx, connect.NewRequest(&agentv1.ListCommandsRequest{}))
	if err != nil {
		return nil, wire.Decode(err)
	}
	var running []string
	for _, c := range list.Msg.GetCommands() {
		if c.GetRunning() {
			running = append(running, strings.Join(c.GetArgv(), " "))
		}
	}
	return running, nil
}

// List gives checkpoints, newest first.
func (d checkpointAPI) List(ctx context.Context, req *connect.Request[holdpointv1.ListCheckpointsRequest]) (*connect.Response[holdpointv1.ListCheckpointsResponse], error) {
	machineID, err := d.machineID(ctx, req.Msg.GetMachine())
	if err != nil {
		return nil, wire.Encode(err)
	}
	list, err := d.catalog.ListCheckpoints(ctx, machineID)
	if err != nil {
		return nil, wire.Encode(err)
	}
	out := &holdpointv1.ListCheckpointsResponse{}
	machines := map[string]catalog.Machine{}
	for _, k := range list {
		m, known := machines[k.MachineID]
		if !known {
			if m, err = d.catalog.GetMachine(ctx, k.MachineID); err != nil {
				return nil, wire.Encode(err)
			}
			machines[k.MachineID] = m
		}
		view, err := d.view.Checkpoint(k, m)
		if err != nil {
			return nil, wire.Encode(err)
		}
		out.Checkpoints = append(out.Checkpoints, view)
	}
	return connect.NewResponse(out), nil
}

// resolve finds a checkpoint, of one machine where it is named.
func (d *Daemon) resolveCheckpoint(ctx context.Context, machineRef, ref string) (checkpoint.Checkpoint, error) {
	machineID, err := d.machineID(ctx, machineRef)
	if err != nil {
		return checkpoint.Checkpoint{}, err
	}
	return d.catalog.ResolveCheckpoint(ctx, machineID, ref)
}

// Get gives one checkpoint.
func (d checkpointAPI) Get(ctx context.Context, req *connect.Request[holdpointv1.GetCheckpointRequest]) (*connect.Response[holdpointv1.Checkpoint], error) {
	k, err := d.resolveCheckpoint(ctx, req.Msg.GetMachine(), req.Msg.GetCheckpoint())
	if err != nil {
		return nil, wire.Encode(err)
	}
	view, err := d.view.CheckpointNow(ctx, k)
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(view), nil
}

// Remove forgets a checkpoint's record; its layers go when nothing else needs them.
func (d checkpointAPI) Remove(ctx context.Context, req *connect.Request[holdpointv1.RemoveCheckpointRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return d.begin(ctx, r.GetRequestId(), "checkpoint rm", r, quickDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		k, err := d.resolveCheckpoint(ctx, r.GetMachine(), r.GetCheckpoint())
		if err != nil {
			return nil, err
		}
		claim := catalog.Claim{Kind: catalog.CheckpointResource, ID: k.ID, Exclusive: true}
		if err := d.catalog.Acquire(ctx, w.ID(), leaseTime, claim); err != nil {
			return nil, err
		}
		return nil, d.catalog.ForgetCheckpoint(ctx, k.ID, w.ID())
	})
}
