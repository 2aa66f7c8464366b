//go:build linux

package daemon

import (
	"context"
	"fmt"
	"os"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// operationAPI serves OperationService.
type operationAPI struct{ *Daemon }

// List gives operations, newest first.
func (d operationAPI) List(ctx context.Context, req *connect.Request[holdpointv1.ListOperationsRequest]) (*connect.Response[holdpointv1.ListOperationsResponse], error) {
	machineID, err := d.desk.MachineID(ctx, req.Msg.GetMachine())
	if err != nil {
		return nil, wire.Encode(err)
	}
	ops, err := d.catalog.ListOperations(ctx, machineID, req.Msg.GetAll())
	if err != nil {
		return nil, wire.Encode(err)
	}
	out := &holdpointv1.ListOperationsResponse{}
	for _, op := range ops {
		view, err := d.engine.Get(ctx, op.ID)
		if err != nil {
			view = operation.Describe(op)
		}
		out.Operations = append(out.Operations, view)
	}
	return connect.NewResponse(out), nil
}

// on resolves an operation and asks the engine about it.
func (d operationAPI) on(ctx context.Context, ref string, ask func(context.Context, string) (*holdpointv1.Operation, error)) (*connect.Response[holdpointv1.Operation], error) {
	op, err := d.catalog.ResolveOperation(ctx, ref)
	if err != nil {
		return nil, wire.Encode(err)
	}
	view, err := ask(ctx, op.ID)
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(view), nil
}

// Get gives an operation as it is now.
func (d operationAPI) Get(ctx context.Context, req *connect.Request[holdpointv1.GetOperationRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return d.on(ctx, req.Msg.GetOperation(), d.engine.Get)
}

// Wait answers when the operation has ended.
func (d operationAPI) Wait(ctx context.Context, req *connect.Request[holdpointv1.GetOperationRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return d.on(ctx, req.Msg.GetOperation(), d.engine.Wait)
}

// Cancel asks for the operation's end and answers when it has ended.
func (d operationAPI) Cancel(ctx context.Context, req *connect.Request[holdpointv1.GetOperationRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return d.on(ctx, req.Msg.GetOperation(), d.engine.Cancel)
}

// Watch sends the operation now and after each change.
func (d operationAPI) Watch(ctx context.Context, req *connect.Request[holdpointv1.GetOperationRequest], stream *connect.ServerStream[holdpointv1.Operation]) error {
	op, err := d.catalog.ResolveOperation(ctx, req.Msg.GetOperation())
	if err != nil {
		return wire.Encode(err)
	}
	return wire.Encode(d.engine.Watch(ctx, op.ID, stream.Send))
}

// daemonAPI serves DaemonService.
type daemonAPI struct{ *Daemon }

// Status says who serves here.
func (d daemonAPI) Status(ctx context.Context, _ *connect.Request[holdpointv1.DaemonStatusRequest]) (*connect.Response[holdpointv1.DaemonStatusResponse], error) {
	machines, err := d.catalog.ListMachines(ctx)
	if err != nil {
		return nil, wire.Encode(err)
	}
	out := &holdpointv1.DaemonStatusResponse{
		Pid: int64(os.Getpid()), Build: d.cfg.Build, Home: d.cfg.Home.Dir(), Proxy: d.doors().Addr(),
		Machines: uint32(len(machines)), StartedAt: timestamppb.New(d.started),
	}
	for _, m := range machines {
		if keeper.State(m, d.keeper.Run(m.ID)) == machine.Running {
			out.Running++
		}
	}
	return connect.NewResponse(out), nil
}

// Stop ends the daemon.
func (d daemonAPI) Stop(context.Context, *connect.Request[holdpointv1.DaemonStopRequest]) (*connect.Response[holdpointv1.DaemonStopResponse], error) {
	d.Daemon.Stop()
	return connect.NewResponse(&holdpointv1.DaemonStopResponse{}), nil
}

// Doctor says what works on this host.
func (d daemonAPI) Doctor(ctx context.Context, _ *connect.Request[holdpointv1.DoctorRequest]) (*connect.Response[holdpointv1.DoctorResponse], error) {
	out := &holdpointv1.DoctorResponse{}
	for _, check := range append(d.cfg.Host.Checks(ctx), d.homeCheck(), d.spaceCheck()) {
		out.Checks = append(out.Checks, &holdpointv1.DoctorCheck{Name: check.Name, State: check.State, Detail: check.Detail, Fix: check.Fix})
	}
	return connect.NewResponse(out), nil
}

// homeCheck says whether the home's file system can hold it.
func (d *Daemon) homeCheck() Check {
	check := Check{Name: "home", State: "ok", Detail: d.cfg.Home.Dir()}
	if why, fix := d.cfg.Home.Unfit(); why != "" {
		check.State, check.Detail, check.Fix = "degraded", why, fix
	}
	return check
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
