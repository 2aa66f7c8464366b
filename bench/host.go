//go:build linux

package main

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/proc"
	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/client"
)

const (
	bootRounds = 3
	cliRounds  = 30
	idleTime   = 10 * time.Second
)

func measureBoot(ctx context.Context, s *stage.Stage, t *table.Table) error {
	m, err := s.Shared(ctx)
	if err != nil {
		return err
	}
	t.Add(table.Row{What: "`run`: a new machine until its guest answers", Measured: table.MS(total(s.WebSteps)), Phases: stage.ListPhases(stage.Phases(s.WebSteps))})
	var starts, stops []time.Duration
	var last []stage.Step
	for range bootRounds {
		_, steps, err := s.Operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
			return s.Client.Machines.Stop(ctx, connect.NewRequest(&holdpointv1.StopMachineRequest{RequestId: client.NewRequestID(), Machine: m.GetName()}))
		})
		if err != nil {
			return err
		}
		stops = append(stops, total(steps))
		op, steps, err := s.Operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
			return s.Client.Machines.Start(ctx, connect.NewRequest(&holdpointv1.StartMachineRequest{RequestId: client.NewRequestID(), Machine: m.GetName()}))
		})
		if err != nil {
			return err
		}
		if now := op.GetResult().GetMachine(); now != nil {
			s.Web = now
		}
		starts, last = append(starts, total(steps)), steps
	}
	t.Add(table.Row{What: "`stop`, graceful", Measured: table.MS(table.Median(stops))})
	t.Add(table.Row{What: "`start` until the guest answers", Measured: table.MS(table.Median(starts)), Phases: "last: " + stage.ListPhases(stage.Phases(last))})
	return nil
}

func total(steps []stage.Step) time.Duration { return steps[len(steps)-1].At.Sub(steps[0].At) }

func measureIdle(ctx context.Context, s *stage.Stage, t *table.Table) error {
	if _, err := s.Shared(ctx); err != nil {
		return err
	}
	status, err := s.Client.Daemon.Status(ctx, connect.NewRequest(&holdpointv1.DaemonStatusRequest{}))
	if err != nil {
		return err
	}
	m, err := s.Client.Machines.Get(ctx, connect.NewRequest(&holdpointv1.GetMachineRequest{Machine: s.Web.GetName()}))
	if err != nil {
		return err
	}
	for _, p := range []struct {
		what   string
		pid    int64
		target int64
	}{{"daemon", status.Msg.GetPid(), 40 << 20}, {"monitor", m.Msg.GetMonitorPid(), 0}} {
		before, err := proc.CPU(p.pid)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(idleTime):
		}
		after, err := proc.CPU(p.pid)
		if err != nil {
			return err
		}
		rss, err := proc.Resident(p.pid)
		if err != nil {
			return err
		}
		busy := float64(after-before) / float64(idleTime) * 100
		r := table.Row{
			What:     "idle " + p.what + ", one machine running",
			Measured: fmt.Sprintf("%.1f MiB resident, %.1f %% CPU", float64(rss)/(1<<20), busy),
		}
		if p.target > 0 {
			r.Target = "≤ 40 MiB, 0 % CPU"
			r.Met = rss <= p.target && busy < 0.5
		}
		t.Add(r)
	}
	return nil
}

func measureCLI(ctx context.Context, s *stage.Stage, t *table.Table) error {
	curl := func() (time.Duration, error) {
		return timed(exec.CommandContext(ctx, "curl", "-sS", "--fail", "-o", "/dev/null", "--unix-socket", s.Home.Socket(),
			"-H", "Content-Type: application/json", "-d", "{}", "http://holdpoint/holdpoint.v1.MachineService/List"))
	}
	ls := func() (time.Duration, error) { return timed(s.Command(ctx, "ls")) }
	version := func() (time.Duration, error) { return timed(s.Command(ctx, "version")) }
	mine, theirs, err := table.InTurns(cliRounds, ls, curl)
	if err != nil {
		return err
	}
	start, _, err := table.InTurns(cliRounds/3, version, version)
	if err != nil {
		return err
	}
	r := table.Ratio(mine, theirs)
	t.Add(table.Row{
		What: "`holdpoint ls`, daemon warm, whole process", Measured: table.MS(mine), Against: "curl --unix-socket " + table.MS(theirs),
		Ratio: r, Target: "≤ 3 ×", Met: r <= 3, Phases: "`holdpoint version`, which asks nobody: " + table.MS(start),
	})
	return nil
}

// timed runs a command to its end.
func timed(cmd *exec.Cmd) (time.Duration, error) {
	begin := time.Now()
	out, err := cmd.CombinedOutput()
	took := time.Since(begin)
	if err != nil {
		return 0, fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, out)
	}
	return took, nil
}
