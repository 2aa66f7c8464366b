//go:build linux

package keeper

import (
	"context"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// factsTimeout bounds the question what listens in a guest; a checkpoint does
// without an answer.
const factsTimeout = 5 * time.Second

// RoutesNow is the machine's routes with what is known of who listens.
func (k *Keeper) RoutesNow(ctx context.Context, m catalog.Machine, run *fleet.Run) ([]checkpoint.Route, error) {
	routes, err := k.cfg.Catalog.ListRoutes(ctx, m.ID)
	if err != nil {
		return nil, err
	}
	started := map[int]bool{}
	if run != nil && len(routes) > 0 {
		asking, cancel := context.WithTimeout(ctx, factsTimeout)
		defer cancel()
		facts, err := run.Agent().Facts(asking, connect.NewRequest(&agentv1.FactsRequest{}))
		if err != nil {
			k.cfg.Log.Warn("ask the guest what listens", "machine", m.Name, "error", err)
		} else {
			for _, l := range facts.Msg.GetListeners() {
				if restore.StartedByBoot(m.Spec.OnBoot, l.GetProcess()) {
					started[int(l.GetPort())] = true
				}
			}
		}
	}
	var now []checkpoint.Route
	for _, r := range routes {
		now = append(now, checkpoint.Route{Host: r.Host, Port: r.Port, Listening: started[r.Port]})
	}
	return now, nil
}
