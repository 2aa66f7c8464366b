//go:build linux

package full

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/proc"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/client"
)

// The goals of a fork under emulation.
const (
	forkCPU    = 500 * time.Millisecond
	forkMemory = 96 << 20
	// forkRounds at most of 8 at once; a fork of 32 takes tens of seconds.
	forkRounds = 5
	manyRounds = 2
	memoryOf   = 8
)

// Fork measures what forks cost: CPU time, and memory of their own after each
// has run a hundred lines of Python.
func (b *Bench) Fork(ctx context.Context) (err error) {
	// An idle program: what the forks' guests do by themselves is not the fork's.
	m, _, err := b.machine(ctx, busyName, 0, inUse, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stage.Remove(ctx, busyName)) }()
	c, err := b.checkpoint(ctx, busyName)
	if err != nil {
		return err
	}
	id := c.GetCheckpoint().GetId()
	// The round that does not count is the one in which the memory file is made.
	if err := b.forkRow(ctx, id, 8, min(b.rounds, forkRounds), 1); err != nil {
		return err
	}
	if err := b.forkRow(ctx, id, 32, min(b.rounds, manyRounds), 0); err != nil {
		return err
	}
	return b.forkMemory(ctx, m, id)
}

// fork makes n machines that all answer.
func (b *Bench) fork(ctx context.Context, id string, n uint32) ([]*holdpointv1.ForkResult, error) {
	r, err := b.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return b.stage.Client.Machines.Fork(ctx, connect.NewRequest(&holdpointv1.ForkRequest{
			RequestId: client.NewRequestID(), Checkpoint: id, Count: n, Name: "try",
		}))
	})
	if err != nil {
		return nil, err
	}
	for _, f := range r.GetForks() {
		if f.GetError() != nil {
			return nil, fmt.Errorf("fork %s: %s", f.GetName(), f.GetError().GetMessage())
		}
	}
	return r.GetForks(), nil
}

func (b *Bench) removeForks(ctx context.Context, forks []*holdpointv1.ForkResult) error {
	var errs []error
	for _, f := range forks {
		errs = append(errs, b.stage.Remove(ctx, f.GetMachine().GetName()))
	}
	return errors.Join(errs...)
}

// forkRow measures forks of n machines, in rounds, after skip that do not count.
func (b *Bench) forkRow(ctx context.Context, id string, n uint32, rounds, skip int) error {
	status, err := b.stage.Client.Daemon.Status(ctx, connect.NewRequest(&holdpointv1.DaemonStatusRequest{}))
	if err != nil {
		return err
	}
	daemon := status.Msg.GetPid()
	var each, qemus, monitors, daemons, whole, ready times
	for i := range rounds + skip {
		fmt.Fprintf(b.stage.Log, "fork × %d, round %d of %d …\n", n, i+1, rounds+skip)
		before, err := proc.CPU(daemon)
		if err != nil {
			return err
		}
		begin := time.Now()
		forks, err := b.fork(ctx, id, n)
		if err != nil {
			return err
		}
		took := time.Since(begin)
		after, err := proc.CPU(daemon)
		if err != nil {
			return err
		}
		qemu, monitor, err := b.cpuOf(ctx, forks)
		if err != nil {
			return err
		}
		if i >= skip {
			count := time.Duration(n)
			each = append(each, millis((qemu+monitor+after-before)/count))
			qemus, monitors, daemons = append(qemus, millis(qemu/count)), append(monitors, millis(monitor/count)), append(daemons, millis((after-before)/count))
			whole = append(whole, millis(took))
			for _, f := range forks {
				ready = append(ready, f.GetReadyMs())
			}
		}
		if err := b.removeForks(ctx, forks); err != nil {
			return err
		}
	}
	b.table.Add(table.Row{
		What: fmt.Sprintf("fork × %d, all answering: CPU time for each", n), Measured: fmt.Sprintf("%.0f ms of one core", each.p50()),
		Target: "≤ 500 ms of one core (KVM: 120 ms, not measured here)", Met: each.p50() <= millis(forkCPU),
		Phases: fmt.Sprintf("QEMU %.0f, monitor %.0f, daemon %.0f ms; %.0f ms in all, each ready after %.0f ms; %d rounds", qemus.p50(), monitors.p50(),
			daemons.p50(), whole.p50(), ready.p50(), rounds),
	})
	return nil
}

// cpuOf is what the processes of all the machines have used so far.
func (b *Bench) cpuOf(ctx context.Context, forks []*holdpointv1.ForkResult) (qemu, monitor time.Duration, err error) {
	for _, f := range forks {
		m, err := b.stage.Client.Machines.Get(ctx, connect.NewRequest(&holdpointv1.GetMachineRequest{Machine: f.GetMachine().GetName()}))
		if err != nil {
			return 0, 0, err
		}
		q, err := proc.CPU(m.Msg.GetQemuPid())
		if err != nil {
			return 0, 0, err
		}
		mon, err := proc.CPU(m.Msg.GetMonitorPid())
		if err != nil {
			return 0, 0, err
		}
		qemu, monitor = qemu+q, monitor+mon
	}
	return qemu, monitor, nil
}

// python is a hundred lines that do a little of what agents' scripts do.
func python() []string {
	var lines strings.Builder
	lines.WriteString("import json, re, hashlib\nd = {}\n")
	for i := range 97 {
		fmt.Fprintf(&lines, "d['key%d'] = hashlib.sha256(json.dumps([%d] * 20).encode()).hexdigest()\n", i, i)
	}
	lines.WriteString("print(len(re.findall('a', json.dumps(d))))\n")
	return []string{"python3", "-c", lines.String()}
}

func (b *Bench) forkMemory(ctx context.Context, m *holdpointv1.Machine, id string) (err error) {
	forks, err := b.fork(ctx, id, memoryOf)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.removeForks(ctx, forks)) }()
	for _, f := range forks {
		if _, err := b.stage.Exec(ctx, f.GetMachine().GetName(), python()...); err != nil {
			return err
		}
	}
	var own, qemus, monitors times
	for _, f := range forks {
		got, err := b.stage.Client.Machines.Get(ctx, connect.NewRequest(&holdpointv1.GetMachineRequest{Machine: f.GetMachine().GetName()}))
		if err != nil {
			return err
		}
		q, err := proc.Private(got.Msg.GetQemuPid())
		if err != nil {
			return err
		}
		mon, err := proc.Private(got.Msg.GetMonitorPid())
		if err != nil {
			return err
		}
		own, qemus, monitors = append(own, mib(q+mon)), append(qemus, mib(q)), append(monitors, mib(mon))
	}
	p, _, err := b.peer(ctx, m, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if _, err := p.Guest(ctx).Exec(&agentv1.ExecStart{Argv: python()}, nil); err != nil {
		return err
	}
	alone, err := proc.Private(p.PID())
	if err != nil {
		return err
	}
	b.table.Add(table.Row{
		What: "memory of its own of each of 8 forks, monitor included", Measured: fmt.Sprintf("%.0f MiB", own.p50()),
		Against: fmt.Sprintf("an unshared boot: %.0f MiB", mib(alone)), Ratio: own.p50() / mib(alone),
		Target: "≤ 96 MiB", Met: own.p50() <= mib(forkMemory), Phases: fmt.Sprintf("QEMU %.0f MiB, monitor %.0f MiB", qemus.p50(), monitors.p50()),
	})
	return nil
}

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }
