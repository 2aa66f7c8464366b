//go:build linux

package daemon

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// routeAPI serves RouteService.
type routeAPI struct{ *Daemon }

// Expose publishes a port of a machine under a host name.
func (d routeAPI) Expose(ctx context.Context, req *connect.Request[holdpointv1.ExposeRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	if r.GetPort() < 1 || r.GetPort() > 65535 {
		return nil, wire.Encode(errdefs.New(errdefs.Invalid, "expose: port %d: use 1 to 65535", r.GetPort()))
	}
	host := ""
	if r.GetHost() != "" {
		clean, err := machine.CheckHost(r.GetHost())
		if err != nil {
			return nil, wire.Encode(err)
		}
		host = clean
	}
	return d.desk.Begin(ctx, r.GetRequestId(), "expose", r, admission.QuickDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		m, err := d.catalog.ResolveMachine(ctx, r.GetMachine())
		if err != nil {
			return nil, err
		}
		w.Machine(m.ID, m.Name)
		name := host
		if name == "" {
			name = m.Name + ".localhost"
		}
		door, err := d.gates.Admit(ctx, hold.Request{Machine: m.ID, Door: hold.Dial, What: "expose " + name, Waiting: w.Say})
		if err != nil {
			return nil, err
		}
		defer door.Done()
		if err := d.catalog.PutRoute(ctx, catalog.Route{Host: name, MachineID: m.ID, Port: int(r.GetPort()), CreatedAt: time.Now()}); err != nil {
			return nil, err
		}
		route, err := d.catalog.GetRoute(ctx, name)
		if err != nil {
			return nil, err
		}
		result := &holdpointv1.OperationResult{Routes: d.view.Routes([]catalog.Route{route})}
		return result, d.recordRoute(ctx, catalog.Published, route)
	})
}

// Unexpose withdraws a host name.
func (d routeAPI) Unexpose(ctx context.Context, req *connect.Request[holdpointv1.UnexposeRequest]) (*connect.Response[holdpointv1.Operation], error) {
	host, err := machine.CheckHost(req.Msg.GetHost())
	if err != nil {
		return nil, wire.Encode(err)
	}
	return d.desk.Begin(ctx, req.Msg.GetRequestId(), "unexpose", req.Msg, admission.QuickDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		route, err := d.catalog.GetRoute(ctx, host)
		if err != nil {
			return nil, err
		}
		w.Machine(route.MachineID, route.Machine)
		door, err := d.gates.Admit(ctx, hold.Request{Machine: route.MachineID, Door: hold.Dial, What: "unexpose " + host, Waiting: w.Say})
		if err != nil {
			return nil, err
		}
		defer door.Done()
		if err := d.catalog.RemoveRoute(ctx, host); err != nil {
			return nil, err
		}
		result := &holdpointv1.OperationResult{Routes: d.view.Routes([]catalog.Route{route})}
		return result, d.recordRoute(ctx, catalog.Withdrawn, route)
	})
}

// recordRoute records an effect outside the disk.
func (d *Daemon) recordRoute(ctx context.Context, kind catalog.EffectKind, r catalog.Route) error {
	return d.catalog.RecordEffect(ctx, catalog.Effect{MachineID: r.MachineID, Kind: kind, What: fmt.Sprintf("%s → port %d", r.Host, r.Port)})
}

// List gives routes by host.
func (d routeAPI) List(ctx context.Context, req *connect.Request[holdpointv1.ListRoutesRequest]) (*connect.Response[holdpointv1.ListRoutesResponse], error) {
	machineID, err := d.desk.MachineID(ctx, req.Msg.GetMachine())
	if err != nil {
		return nil, wire.Encode(err)
	}
	routes, err := d.catalog.ListRoutes(ctx, machineID)
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(&holdpointv1.ListRoutesResponse{Routes: d.view.Routes(routes)}), nil
}
