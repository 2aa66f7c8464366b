//go:build linux

package settle

import (
	"context"

	"google.golang.org/protobuf/encoding/protojson"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// settleUnentered tells what became of an operation that has entered no phase. It
// has had no effect, unless its verb has no phases, because what it does is one
// step: then the machine tells, or it is not known.
func (s *Settler) settleUnentered(ctx context.Context, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	shows := ""
	switch op.Verb {
	case "pause":
		return s.settlePaused(ctx, op, machine.Paused)
	case "resume":
		return s.settlePaused(ctx, op, machine.Running)
	case "rename":
		shows = "holdpoint ls"
	case "checkpoint rm", "checkpoint pool":
		shows = "holdpoint checkpoint ls"
	case "expose", "unexpose":
		shows = "holdpoint routes"
	case "image rm":
		shows = "holdpoint image ls"
	default:
		return nil, interrupted(op, "nothing was done")
	}
	return nil, errdefs.New(errdefs.OutcomeUnknown, "%s: the daemon ended meanwhile; whether it was done shows: %s", op.Verb, shows)
}

// settlePaused tells whether a machine was paused, or let go, by what it is now.
func (s *Settler) settlePaused(ctx context.Context, op catalog.Operation, done machine.State) (*holdpointv1.OperationResult, error) {
	var options holdpointv1.PauseMachineRequest // which that of resume equals
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(op.Options, &options); err != nil {
		return nil, errdefs.New(errdefs.Storage, "settle %s: read its options: %w", op.Verb, err)
	}
	m, err := s.cfg.Catalog.ResolveMachine(ctx, options.GetMachine())
	if errdefs.Is(err, errdefs.NotFound) {
		return nil, interrupted(op, "nothing was done")
	}
	if err != nil {
		return nil, err
	}
	state := keeper.State(m, s.cfg.Keeper.Run(m.ID))
	if state != done {
		return nil, interrupted(op, "machine "+m.Name+" is "+string(state))
	}
	return s.cfg.View.MachineResult(ctx, m.ID)
}
