//go:build linux

package machines

import (
	"context"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// Rename gives a machine another name, in whatever state it is. The guest is
// told at its next boot: programs that run go by the host name they know.
func (s *Service) Rename(ctx context.Context, req *connect.Request[holdpointv1.RenameMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	if err := machine.CheckName("machine", r.GetName()); err != nil {
		return nil, wire.Encode(err)
	}
	return s.Begin(ctx, r.GetRequestId(), "rename", r, admission.QuickDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		m, err := s.Claim(ctx, w, r.GetMachine())
		if err != nil {
			return nil, err
		}
		if err := s.Catalog.Rename(ctx, m.ID, r.GetName()); err != nil {
			return nil, err
		}
		w.Machine(m.ID, r.GetName())
		return s.View.MachineResult(ctx, m.ID)
	})
}
