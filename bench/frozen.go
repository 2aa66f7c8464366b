//go:build linux

package main

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/client"
)

const (
	frozenTarget  = 30  // ms
	frozenShorter = 100 // than stop, copy, boot
)

// measureFrozen takes frozen checkpoints of a guest that has little or much to
// write out, and stopped ones of the same machine in turns.
func (o options) measureFrozen(ctx context.Context, s *stage.Stage, t *table.Table) error {
	m, _, err := s.Machine(ctx, "frozen", "debian", &holdpointv1.Spec{})
	if err != nil {
		return err
	}
	stopped, _, err := stoppedCheckpoint(ctx, s, m.GetName())
	if err != nil {
		return err
	}
	down := stopped.GetDowntimeMs()
	for _, c := range []struct{ what, fill string }{
		{"downtime of a `frozen` checkpoint, for what is written to the disk", "echo x >> /root/change"},
		{"the same with 50 MB in the guest that are not on its disk yet", "head -c 50M /dev/zero > /root/change"},
	} {
		if err := frozenRow(ctx, s, t, c.what, c.fill, m.GetName(), o.rounds, down); err != nil {
			return err
		}
	}
	return s.Remove(ctx, m.GetName())
}

func frozenRow(ctx context.Context, s *stage.Stage, t *table.Table, what, fill, machine string, rounds int, stopped float64) error {
	var down, durable, sync, freeze, change, publish []float64
	for range rounds {
		if _, err := s.Exec(ctx, machine, "sh", "-c", fill); err != nil {
			return err
		}
		op, _, err := s.Operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
			return s.Client.Checkpoints.Create(ctx, connect.NewRequest(&holdpointv1.CreateCheckpointRequest{
				RequestId: client.NewRequestID(), Machine: machine, Kind: "disk", Mode: "frozen",
			}))
		})
		if err != nil {
			return err
		}
		r := op.GetResult().GetCheckpoint()
		down, durable = append(down, r.GetDowntimeMs()), append(durable, r.GetDurableMs())
		sync, freeze = append(sync, r.GetSyncMs()), append(freeze, r.GetFreezeMs())
		change, publish = append(change, r.GetSwitchMs()), append(publish, r.GetPublishMs())
	}
	p50, p95 := table.Median(down), table.Percentile(down, 95)
	t.Add(table.Row{
		What: what, Measured: fmt.Sprintf("p50 %.1f ms, p95 %.1f ms", p50, p95),
		Against: fmt.Sprintf("stop, copy, boot: %.0f ms", stopped), Ratio: p50 / stopped,
		Target: fmt.Sprintf("p50 ≤ %d ms, ≥ %d × shorter (KVM not measured here)", frozenTarget, frozenShorter),
		Met:    p50 <= frozenTarget && stopped >= frozenShorter*p50,
		Phases: fmt.Sprintf("freeze %.1f, switch %.1f ms; before it sync %.0f ms; publish %.0f ms; durable p50 %.0f ms; %d rounds",
			table.Median(freeze), table.Median(change), table.Median(sync), table.Median(publish), table.Median(durable), rounds),
	})
	return nil
}
