//go:build linux

package daemon

import (
	"context"
	"net"
	"net/http"

	"connectrpc.com/connect"

	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// maxMessageBytes bounds one message of the API; the largest are an image's
// script and the pieces of a copy, each about 2 MiB.
const maxMessageBytes = 8 << 20

// Handler serves the whole API.
func (d *Daemon) Handler() http.Handler {
	mux := http.NewServeMux()
	limit := connect.WithReadMaxBytes(maxMessageBytes)
	mux.Handle(holdpointv1connect.NewDaemonServiceHandler(daemonAPI{d}, limit))
	mux.Handle(holdpointv1connect.NewImageServiceHandler(imageAPI{d}, limit))
	mux.Handle(holdpointv1connect.NewMachineServiceHandler(d.machines, limit))
	path, guest := holdpointv1connect.NewGuestServiceHandler(d.guest, limit)
	mux.Handle(path, wire.KeepWriter(guest))
	mux.Handle(holdpointv1connect.NewCheckpointServiceHandler(d.checkpoints, limit))
	mux.Handle(holdpointv1connect.NewRouteServiceHandler(routeAPI{d}, limit))
	mux.Handle(holdpointv1connect.NewOperationServiceHandler(operationAPI{d}, limit))
	return mux
}

// Route gives the route of a published host name and its machine; NOT_FOUND if
// it is not published.
func (d *Daemon) Route(ctx context.Context, host string) (catalog.Route, catalog.Machine, error) {
	route, err := d.catalog.GetRoute(ctx, host)
	if err != nil {
		return route, catalog.Machine{}, err
	}
	m, err := d.catalog.GetMachine(ctx, route.MachineID)
	return route, m, err
}

// noProxy is there until the proxy is.
type noProxy struct{}

func (noProxy) Addr() string { return "" }

func (noProxy) Reserve(int) (func(), error) {
	return nil, errdefs.New(errdefs.WrongState, "expose: the daemon is starting; try again")
}

func (noProxy) Problem(int) error { return nil }

func (noProxy) Settle(context.Context) {}

// Published is where a published route leads now.
type Published struct {
	Host       string
	MachineID  string
	Generation uint64
	Port       int
}

// Published gives where all routes lead now, and the ids of all machines.
func (d *Daemon) Published(ctx context.Context) (routes []Published, machines map[string]bool, err error) {
	list, err := d.catalog.ListMachines(ctx)
	if err != nil {
		return nil, nil, err
	}
	generation := map[string]uint64{}
	machines = map[string]bool{}
	for _, m := range list {
		generation[m.ID], machines[m.ID] = m.Generation, true
	}
	published, err := d.catalog.ListRoutes(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	for _, r := range published {
		routes = append(routes, Published{Host: r.Host, MachineID: r.MachineID, Generation: generation[r.MachineID], Port: r.Port})
	}
	return routes, machines, nil
}

// DialPort connects to a port in a machine; see guest.Service.DialPort.
func (d *Daemon) DialPort(ctx context.Context, machineID string, generation uint64, port int) (net.Conn, error) {
	return d.guest.DialPort(ctx, machineID, generation, port)
}
