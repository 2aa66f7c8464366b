//go:build linux

package machines

import (
	"context"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/revive"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// StartAgain starts a machine that has stopped by itself, unless that is not wanted
// any more, and returns when it runs. With ctx that is taken back, and over then.
func (s *Service) StartAgain(ctx context.Context, machineID string) error {
	return s.Engine.Run(context.WithoutCancel(ctx), operation.Request{Verb: "start", Options: &holdpointv1.StartMachineRequest{Machine: machineID}, Timeout: admission.StoryDeadline},
		func(body context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
			body, cancel := context.WithCancelCause(body)
			defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
			m, err := s.Claim(body, w, machineID)
			if err != nil {
				return nil, err
			}
			wanted, err := revive.Wanted(body, s.Catalog, s.Keeper, m.ID)
			if err == nil && wanted {
				err = s.start(body, w, m)
			}
			if err != nil {
				return nil, err
			}
			return s.View.MachineResult(body, m.ID)
		})
}

// Reap removes the machines that were to go when they stop and have stopped, and
// those that were not completed and could not be removed then, in operations of
// their own.
func (s *Service) Reap(ctx context.Context) {
	list, err := s.Catalog.ListMachines(ctx)
	if err != nil {
		s.Log.Warn("look for machines to remove", "error", err)
		return
	}
	for _, m := range list {
		over := m.RemoveOnStop && keeper.State(m, s.Keeper.Run(m.ID)) == machine.Stopped || m.State == machine.Creating
		if !over || m.HeldBy != "" { // whoever makes one holds it
			continue
		}
		options := &holdpointv1.RemoveMachineRequest{Machine: m.ID, Force: true}
		_, err := s.Engine.Begin(ctx, operation.Request{Verb: "rm", Options: options, Timeout: reapDeadline},
			func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
				return s.remove(ctx, w, options)
			})
		if err != nil && !errdefs.Is(err, errdefs.WrongState) { // the daemon is stopping
			s.Log.Warn("remove a machine that has stopped", "machine", m.Name, "error", err)
		}
	}
}

// reapDeadline bounds the removal of a stopped machine.
const reapDeadline = time.Minute
