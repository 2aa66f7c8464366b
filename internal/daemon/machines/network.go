//go:build linux

package machines

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// tellClosed tells of the connections that a machine which goes on from a
// checkpoint has lost.
func tellClosed(w *operation.Work, m catalog.Machine, closed int) {
	if closed > 0 {
		w.Note("machine %s: %d connections to the outside, which were open at the checkpoint, are closed", m.Name, closed)
	}
}

// Network tells what the machine's network has refused.
func (s *Service) Network(ctx context.Context, req *connect.Request[holdpointv1.GetMachineRequest]) (*connect.Response[holdpointv1.MachineNetwork], error) {
	m, err := s.Catalog.ResolveMachine(ctx, req.Msg.GetMachine())
	if err != nil {
		return nil, wire.Encode(err)
	}
	run := s.Keeper.Run(m.ID)
	switch {
	case m.Spec.Policy() == nil:
		return nil, wire.Encode(errdefs.New(errdefs.WrongState, "network of machine %s: it has none; run a machine with --network internet or open", m.Name))
	case run == nil || run.Ended():
		return nil, wire.Encode(errdefs.New(errdefs.WrongState, "network of machine %s: it is %s; what was refused is known while it runs", m.Name, m.State))
	}
	report, err := run.Monitor().Network(ctx)
	if err != nil {
		return nil, wire.Encode(err)
	}
	out := &holdpointv1.MachineNetwork{Total: report.GetTotal()}
	for _, r := range report.GetRefusals() {
		out.Refusals = append(out.Refusals, &holdpointv1.NetworkRefusal{
			Protocol: r.GetProtocol(), To: r.GetTo(), Reason: r.GetReason(), Count: r.GetCount(),
			Last: timestamppb.New(time.Unix(0, r.GetLastUnixNano())),
		})
	}
	return connect.NewResponse(out), nil
}
