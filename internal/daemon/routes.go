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
	if err := checkExpose(r); err != nil {
		return nil, wire.Encode(err)
	}
	return d.desk.Begin(ctx, r.GetRequestId(), "expose", r, admission.QuickDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		m, err := d.catalog.ResolveMachine(ctx, r.GetMachine())
		if err != nil {
			return nil, err
		}
		w.Machine(m.ID, m.Name)
		name, release, err := d.routeName(ctx, m, r)
		if err != nil {
			return nil, err
		}
		defer release()
		door, err := d.gates.Admit(ctx, hold.Request{Machine: m.ID, Door: hold.Dial, What: "expose " + name, Waiting: w.Say})
		if err != nil {
			return nil, err
		}
		defer door.Done()
		old, err := d.catalog.GetRoute(ctx, name)
		if err != nil && !errdefs.Is(err, errdefs.NotFound) {
			return nil, err
		}
		if err := d.catalog.PutRoute(ctx, catalog.Route{Host: name, MachineID: m.ID, Port: int(r.GetPort()), CreatedAt: time.Now()}); err != nil {
			return nil, err
		}
		route, err := d.catalog.GetRoute(ctx, name)
		if err != nil {
			return nil, err
		}
		result := &holdpointv1.OperationResult{Routes: d.view.Routes([]catalog.Route{route})}
		if route.MachineID == old.MachineID && route.Port == old.Port {
			return result, nil // it stays as it is
		}
		return result, d.recordRoute(ctx, catalog.Published, route)
	})
}

func checkExpose(r *holdpointv1.ExposeRequest) error {
	switch {
	case r.GetTcp() && r.GetHost() != "":
		return errdefs.New(errdefs.Invalid, "expose: a TCP route has a port of the host and no host name; leave out --host, or --tcp")
	case !r.GetTcp() && r.GetListen() != 0:
		return errdefs.New(errdefs.Invalid, "expose: only a TCP route has a port of the host to itself; use --listen with --tcp")
	case r.GetListen() > 65535:
		return errdefs.New(errdefs.Invalid, "expose: --listen %d: use 1 to 65535", r.GetListen())
	case r.GetHost() != "":
		_, err := machine.CheckHost(r.GetHost())
		return err
	}
	return nil
}

// routeName gives the name of the route that is asked for. What it needs on the
// host is kept until release is called.
func (d routeAPI) routeName(ctx context.Context, m catalog.Machine, r *holdpointv1.ExposeRequest) (name string, release func(), err error) {
	switch {
	case r.GetTcp():
		return d.tcpName(ctx, m, r)
	case r.GetHost() != "":
		name, err = machine.CheckHost(r.GetHost())
		return name, func() {}, err
	}
	return m.Name + ".localhost", func() {}, nil
}

// Without --listen a TCP route gets the port of the host that has the number of
// the machine's, if that is free and from unprivileged on, else one of these.
// They are below those that outgoing connections take (ip_local_port_range), so
// that the port is free again after a restart of the daemon.
const (
	unprivileged  = 1024
	firstTCPPort  = 17800
	portsForRoute = 1000
)

// tcpName gives the address of a TCP route, listened on. What leads to the same
// port of the machine already stays as it is.
func (d routeAPI) tcpName(ctx context.Context, m catalog.Machine, r *holdpointv1.ExposeRequest) (name string, release func(), err error) {
	routes, err := d.catalog.ListRoutes(ctx, "")
	if err != nil {
		return "", nil, err
	}
	taken := map[int]bool{}
	for _, route := range routes {
		listen := machine.ListenPort(route.Host)
		taken[listen] = true
		if listen != 0 && r.GetListen() == 0 && route.MachineID == m.ID && route.Port == int(r.GetPort()) {
			return route.Host, func() {}, nil
		}
	}
	if listen := int(r.GetListen()); listen != 0 {
		release = func() {}
		if !taken[listen] { // else the catalog knows whose it is
			release, err = d.doors().Reserve(listen)
		}
		return machine.TCPHost(listen), release, err
	}
	candidates := []int{int(r.GetPort())}
	for port := firstTCPPort; port < firstTCPPort+portsForRoute; port++ {
		candidates = append(candidates, port)
	}
	for _, port := range candidates {
		if taken[port] || port < unprivileged {
			continue
		}
		if release, err = d.doors().Reserve(port); err == nil {
			return machine.TCPHost(port), release, nil
		}
	}
	return "", nil, errdefs.New(errdefs.Conflict, "expose port %d of machine %s: no port of the host is free; name one with --listen", r.GetPort(), m.Name)
}

// Unexpose withdraws a host name.
func (d routeAPI) Unexpose(ctx context.Context, req *connect.Request[holdpointv1.UnexposeRequest]) (*connect.Response[holdpointv1.Operation], error) {
	host, err := machine.CheckRoute(req.Msg.GetHost())
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
