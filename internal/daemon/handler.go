//go:build linux

package daemon

import (
	"context"
	"net"
	"net/http"

	"connectrpc.com/connect"

	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/catalog"
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

// Published is a route with the generation of its machine.
type Published struct {
	MachineID  string
	Generation uint64
	Port       int
}

// Published gives where all published host names lead now.
func (d *Daemon) Published(ctx context.Context) (map[Published]bool, error) {
	routes, err := d.catalog.ListRoutes(ctx, "")
	if err != nil {
		return nil, err
	}
	published := map[Published]bool{}
	for _, r := range routes {
		m, err := d.catalog.GetMachine(ctx, r.MachineID)
		if err != nil {
			return nil, err
		}
		published[Published{MachineID: m.ID, Generation: m.Generation, Port: r.Port}] = true
	}
	return published, nil
}

// DialPort connects to a port in a machine; see guest.Service.DialPort.
func (d *Daemon) DialPort(ctx context.Context, machineID string, generation uint64, port int) (net.Conn, error) {
	return d.guest.DialPort(ctx, machineID, generation, port)
}
