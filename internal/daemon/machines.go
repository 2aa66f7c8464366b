//go:build linux

package daemon

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/settle"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/undo"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// stopPatience is how long a guest may take to shut down where nobody says.
const stopPatience = 60 * time.Second

// undoTimeout bounds what is undone after a failure.
const undoTimeout = time.Minute

// onMachine is a request for one machine.
type onMachine interface {
	proto.Message
	GetMachine() string
}

// machineAPI serves MachineService.
type machineAPI struct {
	*Daemon
	holdpointv1connect.UnimplementedMachineServiceHandler
}

// The phases of run, in the journal.
const (
	phaseCreate = "create"
	phaseBoot   = "boot"
)

// Run creates a machine and boots it.
func (d machineAPI) Run(ctx context.Context, req *connect.Request[holdpointv1.RunMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	spec, err := checkSpec(r)
	if err != nil {
		return nil, wire.Encode(err)
	}
	return d.begin(ctx, r.GetRequestId(), "run", r, bootDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		return d.run(ctx, w, r.GetName(), r.GetImage(), spec)
	})
}

func checkSpec(r *holdpointv1.RunMachineRequest) (machine.Spec, error) {
	s := r.GetSpec()
	spec := machine.Spec{
		MemoryBytes: s.GetMemoryBytes(), CPUs: int(s.GetCpus()), DiskBytes: s.GetDiskBytes(),
		OnBoot: s.GetOnBoot(), Tmpfs: s.GetTmpfs(), Network: s.GetNetwork(),
	}
	if r.GetName() != "" {
		if err := machine.CheckName("machine", r.GetName()); err != nil {
			return spec, err
		}
	}
	return spec, spec.Complete()
}

func (d machineAPI) run(ctx context.Context, w *operation.Work, name, imageRef string, spec machine.Spec) (*holdpointv1.OperationResult, error) {
	img, err := d.catalog.ResolveImage(ctx, imageRef)
	if err != nil {
		return nil, err
	}
	if spec.DiskBytes == 0 {
		spec.DiskBytes = img.DiskBytes
	}
	if spec.DiskBytes < img.DiskBytes {
		return nil, errdefs.New(errdefs.Invalid, "run: a disk of %d MiB is smaller than that of image %s; use --disk-size %dM or more",
			spec.DiskBytes>>20, imageRef, img.DiskBytes>>20)
	}
	magic := make([]byte, 16)
	rand.Read(magic) // never fails: crypto/rand ends the process instead
	m := catalog.Machine{
		ID: durable.NewID(), Name: name, ImageBuildID: img.BuildID, Spec: spec, State: machine.Creating,
		Generation: 1, LinkMagic: hex.EncodeToString(magic), CreatedAt: time.Now(),
	}
	if m.Name == "" {
		m.Name = "m-" + m.ID[:6]
	}
	w.Machine(m.ID, m.Name)
	if err := w.Enter(ctx, phaseCreate, "creating the machine", settle.RunDetail{MachineID: m.ID}); err != nil {
		return nil, err
	}
	claims := []catalog.Claim{
		{Kind: catalog.MachineResource, ID: m.ID, Exclusive: true}, {Kind: catalog.ImageResource, ID: img.BuildID},
	}
	if err := d.catalog.Acquire(ctx, w.ID(), leaseTime, claims...); err != nil {
		return nil, err
	}
	if err := d.create(ctx, w, m); err != nil {
		return nil, err
	}
	return d.view.MachineResult(ctx, m.ID)
}

// create records a machine and boots it; on error nothing of it is left.
func (d machineAPI) create(ctx context.Context, w *operation.Work, m catalog.Machine) error {
	var steps undo.Stack
	defer steps.Run()
	layer, err := d.capturer.NewLayer(ctx, m.ID, m.Spec.DiskBytes)
	if err != nil {
		return err
	}
	steps.Add(func() { d.capturer.RemoveFile(d.capturer.Path(layer)) })
	if err := d.catalog.CreateMachine(ctx, m, layer); err != nil {
		return err
	}
	steps.Release()
	steps.Add(func() {
		undoing, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		if err := d.keeper.Drop(undoing, w.ID(), m); err != nil {
			d.cfg.Log.Error("undo the creation of a machine", "machine", m.Name, "error", err)
		}
	})
	d.gates.SetGeneration(m.ID, m.Generation)
	if err := w.Enter(ctx, phaseBoot, "booting the guest", settle.RunDetail{MachineID: m.ID}); err != nil {
		return err
	}
	note, err := d.keeper.Boot(ctx, m.ID)
	if err != nil {
		return err
	}
	if note != "" {
		w.Note("%s", note)
	}
	steps.Release()
	return nil
}

// List gives all machines by name.
func (d machineAPI) List(ctx context.Context, _ *connect.Request[holdpointv1.ListMachinesRequest]) (*connect.Response[holdpointv1.ListMachinesResponse], error) {
	machines, err := d.catalog.ListMachines(ctx)
	if err != nil {
		return nil, wire.Encode(err)
	}
	out := &holdpointv1.ListMachinesResponse{}
	for _, m := range machines {
		view, err := d.view.Machine(ctx, m)
		if err != nil {
			return nil, wire.Encode(err)
		}
		out.Machines = append(out.Machines, view)
	}
	return connect.NewResponse(out), nil
}

// Get gives one machine.
func (d machineAPI) Get(ctx context.Context, req *connect.Request[holdpointv1.GetMachineRequest]) (*connect.Response[holdpointv1.Machine], error) {
	m, err := d.catalog.ResolveMachine(ctx, req.Msg.GetMachine())
	if err != nil {
		return nil, wire.Encode(err)
	}
	view, err := d.view.Machine(ctx, m)
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(view), nil
}

// on runs a verb on one machine that is held for it, and answers with the
// machine; allowed are the states the verb may begin in.
func (d machineAPI) on(ctx context.Context, requestID, verb string, options onMachine, allowed []machine.State,
	act func(ctx context.Context, w *operation.Work, m catalog.Machine) error,
) (*connect.Response[holdpointv1.Operation], error) {
	return d.begin(ctx, requestID, verb, options, bootDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		m, err := d.claimMachine(ctx, w, options.GetMachine())
		if err != nil {
			return nil, err
		}
		if err := machine.Allow(verb, m.Name, keeper.State(m, d.keeper.Run(m.ID)), allowed...); err != nil {
			return nil, err
		}
		if err := act(ctx, w, m); err != nil {
			return nil, err
		}
		return d.view.MachineResult(ctx, m.ID)
	})
}

// Start boots a stopped machine.
func (d machineAPI) Start(ctx context.Context, req *connect.Request[holdpointv1.StartMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return d.on(ctx, r.GetRequestId(), "start", r, []machine.State{machine.Stopped}, func(ctx context.Context, w *operation.Work, m catalog.Machine) error {
		if err := w.Enter(ctx, phaseBoot, "booting the guest", settle.RunDetail{MachineID: m.ID}); err != nil {
			return err
		}
		note, err := d.keeper.Boot(ctx, m.ID)
		if note != "" {
			w.Note("%s", note)
		}
		return err
	})
}

// Stop asks the guest to shut down, or ends its run.
func (d machineAPI) Stop(ctx context.Context, req *connect.Request[holdpointv1.StopMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	allowed := []machine.State{machine.Running}
	if r.GetForce() {
		allowed = append(allowed, machine.Paused, machine.Unknown)
	}
	return d.on(ctx, r.GetRequestId(), "stop", r, allowed, func(ctx context.Context, w *operation.Work, m catalog.Machine) error {
		if err := w.Enter(ctx, "stop", "stopping the guest", settle.RunDetail{MachineID: m.ID}); err != nil {
			return err
		}
		run := d.keeper.Run(m.ID)
		if run == nil {
			return errdefs.New(errdefs.WrongState, "stop: machine %s has no run here; run holdpoint daemon stop and try again", m.Name)
		}
		defer d.keeper.Tidy(m.ID)
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
	})
}

// Pause stops the machine's CPUs.
func (d machineAPI) Pause(ctx context.Context, req *connect.Request[holdpointv1.PauseMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return d.on(ctx, req.Msg.GetRequestId(), "pause", req.Msg, []machine.State{machine.Running}, func(ctx context.Context, w *operation.Work, m catalog.Machine) error {
		return d.keeper.SetPaused(ctx, m, true)
	})
}

// Resume lets the machine's CPUs go on.
func (d machineAPI) Resume(ctx context.Context, req *connect.Request[holdpointv1.ResumeMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return d.on(ctx, req.Msg.GetRequestId(), "resume", req.Msg, []machine.State{machine.Paused}, func(ctx context.Context, w *operation.Work, m catalog.Machine) error {
		return d.keeper.SetPaused(ctx, m, false)
	})
}

// Remove deletes a machine with its checkpoints.
func (d machineAPI) Remove(ctx context.Context, req *connect.Request[holdpointv1.RemoveMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return d.begin(ctx, r.GetRequestId(), "rm", r, bootDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		m, err := d.claimMachine(ctx, w, r.GetMachine())
		if err != nil {
			return nil, err
		}
		state := keeper.State(m, d.keeper.Run(m.ID))
		if state != machine.Stopped && !r.GetForce() {
			return nil, errdefs.New(errdefs.WrongState, "rm: machine %s is %s; run holdpoint stop %s first, or holdpoint rm --force %s", m.Name, state, m.Name, m.Name)
		}
		checkpoints, err := d.catalog.ListCheckpoints(ctx, m.ID)
		if err != nil {
			return nil, err
		}
		if len(checkpoints) > 0 && !r.GetForce() {
			return nil, errdefs.New(errdefs.Referenced, "rm: %d checkpoints of machine %s would go with it; see holdpoint checkpoint ls %s, or remove it with them by holdpoint rm --force %s",
				len(checkpoints), m.Name, m.Name, m.Name)
		}
		if len(checkpoints) > 0 {
			w.Note("%d checkpoints of machine %s went with it", len(checkpoints), m.Name)
		}
		if err := w.Enter(ctx, "remove", "removing the machine", settle.RunDetail{MachineID: m.ID}); err != nil {
			return nil, err
		}
		return nil, d.keeper.Drop(ctx, w.ID(), m)
	})
}
