//go:build linux

package machines

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/revive"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// await runs an operation that nobody asked for and returns its outcome.
func (s *Service) await(ctx context.Context, verb string, options proto.Message, body operation.Body) error {
	op, err := s.Engine.Begin(ctx, operation.Request{Verb: verb, Options: options, Timeout: admission.StoryDeadline}, body)
	if err == nil {
		op, err = s.Engine.Wait(ctx, op.GetId())
	}
	if err != nil {
		return err
	}
	if failure := op.GetError(); failure != nil {
		return errdefs.New(errdefs.Kind(failure.GetKind()), "%s", failure.GetMessage())
	}
	return nil
}

// StartAgain starts a machine that has stopped by itself, unless that is not wanted
// any more, and returns when it runs.
func (s *Service) StartAgain(ctx context.Context, machineID string) error {
	return s.await(ctx, "start", &holdpointv1.StartMachineRequest{Machine: machineID},
		func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
			m, err := s.Claim(ctx, w, machineID)
			if err != nil {
				return nil, err
			}
			wanted, err := revive.Wanted(ctx, s.Catalog, s.Keeper, m.ID)
			if err == nil && wanted {
				err = s.start(ctx, w, m)
			}
			if err != nil {
				return nil, err
			}
			return s.View.MachineResult(ctx, m.ID)
		})
}

// Reap removes the machines that were to go when they stop and have stopped,
// in operations of their own.
func (s *Service) Reap(ctx context.Context) {
	list, err := s.Catalog.ListMachines(ctx)
	if err != nil {
		s.Log.Warn("look for machines to remove", "error", err)
		return
	}
	for _, m := range list {
		if !m.RemoveOnStop || m.HeldBy != "" || keeper.State(m, s.Keeper.Run(m.ID)) != machine.Stopped {
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
