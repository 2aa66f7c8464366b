//go:build linux

package machines

import (
	"context"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/meter"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// Stats measures what machines use.
func (s *Service) Stats(ctx context.Context, req *connect.Request[holdpointv1.MachineStatsRequest]) (*connect.Response[holdpointv1.MachineStatsResponse], error) {
	machines, err := s.measured(ctx, req.Msg.GetMachine())
	if err != nil {
		return nil, wire.Encode(err)
	}
	stats, err := meter.Measure(ctx, meter.Config{Catalog: s.Catalog, Keeper: s.Keeper, Path: s.Capturer.Path}, machines)
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(&holdpointv1.MachineStatsResponse{Machines: stats}), nil
}

// measured are the machines that a reference means: all when it is empty.
func (s *Service) measured(ctx context.Context, ref string) ([]catalog.Machine, error) {
	if ref == "" {
		return s.Catalog.ListMachines(ctx)
	}
	m, err := s.Catalog.ResolveMachine(ctx, ref)
	return []catalog.Machine{m}, err
}
