//go:build linux

package full

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/peer"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/client"
)

// The goals of a restore under emulation.
const (
	standbyRunning, fileRunning, layersRunning = 20, 150, 600 // ms
	replyRatio                                 = 1.2
	bootFactor                                 = 10
	bootRounds                                 = 3
)

// restores are those of one kind.
type restores struct{ running, answer times }

// The words of RestoreResult.from.
const (
	fromStandby = "standby"
	fromFile    = "memory-file"
	fromLayers  = "layers"
)

// Restore measures how fast a machine goes on from a checkpoint: from its
// layers, from its memory file, and from a standby, in turns with QEMU's loadvm.
func (b *Bench) Restore(ctx context.Context) (err error) {
	m, _, err := b.machine(ctx, busyName, 0, inUse, dirty)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stage.Remove(ctx, busyName)) }()
	p, _, err := b.peer(ctx, m, dirty)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	boot, err := b.boots(ctx, p)
	if err != nil {
		return err
	}
	if _, _, err := p.SaveVM(ctx, "restore"); err != nil {
		return err
	}
	ours := map[string]*restores{fromStandby: {}, fromFile: {}, fromLayers: {}}
	var here, fresh, reply times
	for i := range b.rounds + warmUp {
		count := i >= warmUp
		if err := b.restoreRound(ctx, ours, count); err != nil {
			return err
		}
		took, err := p.LoadVMHere(ctx, "restore")
		if err != nil {
			return err
		}
		if err := p.End(); err != nil {
			return err
		}
		started, err := p.LoadVM(ctx, "restore")
		if err != nil {
			return err
		}
		if count {
			here, fresh, reply = append(here, millis(took)), append(fresh, millis(started.Running)), append(reply, millis(started.Reply))
		}
	}
	b.restoreRows(ours, here, fresh, reply, boot)
	return nil
}

// boots measures how long the guest takes to boot until it answers.
func (b *Bench) boots(ctx context.Context, p *peer.Peer) (times, error) {
	var boot times
	for range bootRounds {
		if err := p.End(); err != nil {
			return nil, err
		}
		s, err := p.Boot(ctx)
		if err != nil {
			return nil, err
		}
		boot = append(boot, millis(s.Reply))
	}
	return boot, nil
}

// restoreRound makes a checkpoint and restores it in each of the three ways.
func (b *Bench) restoreRound(ctx context.Context, ours map[string]*restores, count bool) error {
	c, err := b.checkpoint(ctx, busyName)
	if err != nil {
		return err
	}
	id := c.GetCheckpoint().GetId()
	for _, want := range []string{fromLayers, fromFile, fromStandby} {
		pool := uint32(0)
		if want == fromStandby {
			pool = 1
		}
		if err := b.pool(ctx, id, pool); err != nil {
			return err
		}
		r, err := b.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
			return b.stage.Client.Machines.Restore(ctx, connect.NewRequest(&holdpointv1.RestoreMachineRequest{
				RequestId: client.NewRequestID(), Machine: busyName, Checkpoint: id, Kind: "full", NoSafety: true,
			}))
		})
		if err != nil {
			return err
		}
		got := r.GetRestore()
		if got.GetFrom() != want {
			fmt.Fprintf(b.stage.Log, "  a restore came from %s instead of %s: not counted\n", got.GetFrom(), want)
			continue
		}
		if count {
			ours[want].running = append(ours[want].running, got.GetRunningMs())
			ours[want].answer = append(ours[want].answer, got.GetAnswerMs())
		}
	}
	return b.pool(ctx, id, 0)
}

func (b *Bench) pool(ctx context.Context, id string, count uint32) error {
	_, err := b.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return b.stage.Client.Checkpoints.SetPool(ctx, connect.NewRequest(&holdpointv1.SetPoolRequest{
			RequestId: client.NewRequestID(), Checkpoint: id, Count: count,
		}))
	})
	return err
}

func (b *Bench) restoreRows(ours map[string]*restores, here, fresh, reply, boot times) {
	for _, k := range []struct {
		what, from string
		goal       float64
	}{
		{"a standby", fromStandby, standbyRunning}, {"the memory file, ready", fromFile, fileRunning}, {"its layers only", fromLayers, layersRunning},
	} {
		r := ours[k.from].running
		b.table.Add(table.Row{
			What: "restore from " + k.what + ", to running", Measured: p50p95(r),
			Against: fmt.Sprintf("loadvm in the same process %.0f ms, in a new one %.0f ms", here.p50(), fresh.p50()), Ratio: r.p50() / here.p50(),
			Target: fmt.Sprintf("≤ %.0f ms (KVM the same, not measured here)", k.goal), Met: len(r) > 0 && r.p50() <= k.goal,
			Phases: fmt.Sprintf("%d rounds", len(r)),
		})
	}
	a := ours[fromFile].answer
	ratio, factor := a.p50()/reply.p50(), boot.p50()/a.p50()
	b.table.Add(table.Row{
		What: "restore from the memory file, to the first reply", Measured: p50p95(a),
		Against: fmt.Sprintf("-loadvm in a new process: %.0f ms; boot: %.0f ms", reply.p50(), boot.p50()), Ratio: ratio,
		Target: "≤ 1.2 × -loadvm, ≥ 10 × faster than a boot", Met: len(a) > 0 && ratio <= replyRatio && factor >= bootFactor,
		Phases: fmt.Sprintf("%.1f × faster than a boot; to running %.1f ms; from a standby %.1f ms, from layers %.1f ms", factor,
			ours[fromFile].running.p50(), ours[fromStandby].answer.p50(), ours[fromLayers].answer.p50()),
	})
}
