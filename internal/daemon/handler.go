//go:build linux

package daemon

import (
	"context"
	"net"
	"net/http"

	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/catalog"
)

// Handler serves the whole API.
func (d *Daemon) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(holdpointv1connect.NewDaemonServiceHandler(daemonAPI{d}))
	mux.Handle(holdpointv1connect.NewImageServiceHandler(imageAPI{d}))
	mux.Handle(holdpointv1connect.NewMachineServiceHandler(machineAPI{d}))
	mux.Handle(holdpointv1connect.NewGuestServiceHandler(d.guest))
	mux.Handle(holdpointv1connect.NewCheckpointServiceHandler(checkpointAPI{d}))
	mux.Handle(holdpointv1connect.NewRouteServiceHandler(routeAPI{d}))
	mux.Handle(holdpointv1connect.NewOperationServiceHandler(operationAPI{d}))
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

// DialPort connects to a port in a machine; see guest.Service.DialPort.
func (d *Daemon) DialPort(ctx context.Context, machineID string, generation uint64, port int) (net.Conn, error) {
	return d.guest.DialPort(ctx, machineID, generation, port)
}
