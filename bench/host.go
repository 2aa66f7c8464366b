//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
)

const (
	bootRounds = 3
	cliRounds  = 30
	idleTime   = 10 * time.Second

	// clockTicks is the unit of CPU times in /proc/PID/stat per second: 100
	// on every Linux/x86 (USER_HZ, proc_pid_stat(5)).
	clockTicks = 100
)

func measureBoot(ctx context.Context, s *stage, t *table) error {
	m, err := s.shared(ctx)
	if err != nil {
		return err
	}
	t.add(row{What: "`run`: a new machine until its guest answers", Measured: ms(total(s.webSteps)), Phases: listPhases(phases(s.webSteps))})
	var starts, stops []time.Duration
	var last []step
	for range bootRounds {
		_, steps, err := s.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
			return s.client.Machines.Stop(ctx, connect.NewRequest(&holdpointv1.StopMachineRequest{RequestId: client.NewRequestID(), Machine: m.GetName()}))
		})
		if err != nil {
			return err
		}
		stops = append(stops, total(steps))
		op, steps, err := s.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
			return s.client.Machines.Start(ctx, connect.NewRequest(&holdpointv1.StartMachineRequest{RequestId: client.NewRequestID(), Machine: m.GetName()}))
		})
		if err != nil {
			return err
		}
		if now := op.GetResult().GetMachine(); now != nil {
			s.web = now
		}
		starts, last = append(starts, total(steps)), steps
	}
	t.add(row{What: "`stop`, graceful", Measured: ms(median(stops))})
	t.add(row{What: "`start` until the guest answers", Measured: ms(median(starts)), Phases: "last: " + listPhases(phases(last))})
	return nil
}

func total(steps []step) time.Duration { return steps[len(steps)-1].at.Sub(steps[0].at) }

func measureIdle(ctx context.Context, s *stage, t *table) error {
	if _, err := s.shared(ctx); err != nil {
		return err
	}
	status, err := s.client.Daemon.Status(ctx, connect.NewRequest(&holdpointv1.DaemonStatusRequest{}))
	if err != nil {
		return err
	}
	m, err := s.client.Machines.Get(ctx, connect.NewRequest(&holdpointv1.GetMachineRequest{Machine: s.web.GetName()}))
	if err != nil {
		return err
	}
	for _, p := range []struct {
		what   string
		pid    int64
		target int64
	}{{"daemon", status.Msg.GetPid(), 40 << 20}, {"monitor", m.Msg.GetMonitorPid(), 0}} {
		before, err := cpuTicks(p.pid)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(idleTime):
		}
		after, err := cpuTicks(p.pid)
		if err != nil {
			return err
		}
		rss, err := resident(p.pid)
		if err != nil {
			return err
		}
		busy := float64(after-before) / clockTicks / idleTime.Seconds() * 100
		r := row{
			What:     "idle " + p.what + ", one machine running",
			Measured: fmt.Sprintf("%.1f MiB resident, %.1f %% CPU", float64(rss)/(1<<20), busy),
		}
		if p.target > 0 {
			r.Target = "≤ 40 MiB, 0 % CPU"
			r.Met = rss <= p.target && busy < 0.5
		}
		t.add(r)
	}
	return nil
}

// cpuTicks is the CPU time of a process so far.
func cpuTicks(pid int64) (int64, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The command's name is in parentheses and may hold anything; utime and
	// stime are the 12th and 13th fields after it.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("read /proc/%d/stat: %d fields", pid, len(fields))
	}
	user, err := strconv.ParseInt(fields[11], 10, 64)
	system, err2 := strconv.ParseInt(fields[12], 10, 64)
	return user + system, errors.Join(err, err2)
}

// resident is a process's resident memory in bytes.
func resident(pid int64) (int64, error) {
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(statm))
	if len(fields) < 2 {
		return 0, fmt.Errorf("read /proc/%d/statm: %q", pid, statm)
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize()), err
}

func measureCLI(ctx context.Context, s *stage, t *table) error {
	curl := func() (time.Duration, error) {
		return timed(exec.CommandContext(ctx, "curl", "-sS", "--fail", "-o", "/dev/null", "--unix-socket", s.home.Socket(),
			"-H", "Content-Type: application/json", "-d", "{}", "http://holdpoint/holdpoint.v1.MachineService/List"))
	}
	ls := func() (time.Duration, error) { return timed(s.command(ctx, "ls")) }
	version := func() (time.Duration, error) { return timed(s.command(ctx, "version")) }
	mine, theirs, err := inTurns(cliRounds, ls, curl)
	if err != nil {
		return err
	}
	start, _, err := inTurns(cliRounds/3, version, version)
	if err != nil {
		return err
	}
	r := ratio(mine, theirs)
	t.add(row{
		What: "`holdpoint ls`, daemon warm, whole process", Measured: ms(mine), Against: "curl --unix-socket " + ms(theirs),
		Ratio: r, Target: "≤ 3 ×", Met: r <= 3, Phases: "`holdpoint version`, which asks nobody: " + ms(start),
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
