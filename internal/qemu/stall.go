//go:build linux

package qemu

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/qmp"
)

const stallVerb = "watch"

// rewatchPause is the pause after a connection that could not be watched.
const rewatchPause = time.Second

// AwaitStall is that of machine.Run. What happened while the connection was
// broken, or before the run was adopted, is found in QEMU's status.
func (r *run) AwaitStall(ctx context.Context) error {
	for {
		client, err := r.connected(ctx, stallVerb)
		if err == nil {
			if err = awaitStall(ctx, client); err == nil {
				return nil
			}
			err = fmt.Errorf("%s run %s: %w", stallVerb, r.cfg.RunID, err)
		}
		if gone := r.usable(stallVerb); gone != nil || ctx.Err() != nil {
			return cmp.Or(gone, err)
		}
		select {
		case <-time.After(rewatchPause):
		case <-ctx.Done():
		}
	}
}

// awaitStall returns nil once QEMU's status says that a write failed. A failed
// write is told before the vCPUs are stopped, or after; the status is asked for
// only then, for else the windows of captures would be asked for it, too.
func awaitStall(ctx context.Context, client *qmp.Client) error {
	events := qmp.NewSubscription(qmp.BlockIOError, qmp.Stop)
	client.Subscribe(events)
	defer client.Unsubscribe(events)
	stalled, err := hasStalled(ctx, client)
	for failed := false; !stalled && err == nil; {
		var e qmp.Event
		if e, err = events.Next(ctx); err != nil {
			break
		}
		if failed = failed || stops(e); failed {
			stalled, err = hasStalled(ctx, client)
		}
	}
	return err
}

// stops reports whether the event is a failed write for which the vCPUs are stopped.
func stops(e qmp.Event) bool {
	var data struct {
		Action string `json:"action"`
	}
	return e.Name == qmp.BlockIOError && json.Unmarshal(e.Data, &data) == nil && data.Action == "stop"
}

func hasStalled(ctx context.Context, client *qmp.Client) (bool, error) {
	var status struct {
		Status string `json:"status"`
	}
	err := client.Execute(ctx, "query-status", nil, &status)
	return status.Status == "io-error", err
}
