//go:build linux

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/bench/table"
)

const (
	execRounds = 40
	forkRounds = 200
	copyRounds = 3
	copyBytes  = 256 << 20
)

// measureExec compares an exec through the daemon with what it cannot be
// below: the guest's own fork and exec, and one round trip of the link.
func measureExec(ctx context.Context, s *stage.Stage, t *table.Table) error {
	m, err := s.Shared(ctx)
	if err != nil {
		return err
	}
	mon, err := s.Monitor(ctx, m)
	if err != nil {
		return err
	}
	defer mon.Close()
	ping := func() (time.Duration, error) {
		begin := time.Now()
		_, err := mon.Agent().Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
		return time.Since(begin), err
	}
	api := func() (time.Duration, error) {
		begin := time.Now()
		_, err := s.Exec(ctx, m.GetName(), "true")
		return time.Since(begin), err
	}
	cli := func() (time.Duration, error) { return timed(s.Command(ctx, "exec", m.GetName(), "--", "true")) }
	version := func() (time.Duration, error) { return timed(s.Command(ctx, "version")) }

	mine, trip, err := table.InTurns(execRounds, api, ping)
	if err != nil {
		return err
	}
	process, start, err := table.InTurns(execRounds/2, cli, version)
	if err != nil {
		return err
	}
	fork, err := forkExec(ctx, s, m.GetName())
	if err != nil {
		return err
	}
	least := fork + trip
	r := table.Ratio(mine, least)
	t.Add(table.Row{
		What: "`exec -- true`, a call of the API", Measured: table.MS(mine), Against: "fork+exec in the guest + link round trip: " + table.MS(least),
		Ratio: r, Target: "≤ 1.5 ×", Met: r <= 1.5, Phases: fmt.Sprintf("fork+exec %s, round trip %s", table.MS(fork), table.MS(trip)),
	})
	whole := table.Ratio(process, least+start)
	t.Add(table.Row{
		What: "`holdpoint exec -- true`, whole process", Measured: table.MS(process), Against: "the same + start of the process: " + table.MS(least+start),
		Ratio: whole, Phases: "start of the process " + table.MS(start),
	})
	return nil
}

// forkExec is what the guest itself takes to fork, run true and wait for it,
// by its own clock.
func forkExec(ctx context.Context, s *stage.Stage, name string) (time.Duration, error) {
	script := fmt.Sprintf("import os,time\n"+
		"def once():\n p=os.fork()\n if p==0: os.execv('/bin/true',['true'])\n os.waitpid(p,0)\n"+
		"ts=[]\nfor i in range(%d):\n b=time.monotonic_ns(); once(); ts.append(time.monotonic_ns()-b)\nprint(sorted(ts)[len(ts)//2])", forkRounds)
	out, err := s.Exec(ctx, name, "python3", "-c", script)
	if err != nil {
		return 0, err
	}
	ns, err := strconv.ParseInt(strings.TrimSpace(out), 10, 64)
	return time.Duration(ns), err
}

// measureCopy compares cp in both directions with a plain byte stream through
// an equal port of an equal machine.
func measureCopy(ctx context.Context, s *stage.Stage, t *table.Table) (err error) {
	m, err := s.Shared(ctx)
	if err != nil {
		return err
	}
	raw, err := newRawPort(ctx, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, raw.close(ctx)) }()
	dir, err := os.MkdirTemp("", "hpbench-cp.")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	file := filepath.Join(dir, "in")
	if err := randomFile(file, copyBytes); err != nil {
		return err
	}
	in := func() (time.Duration, error) { return timed(s.Command(ctx, "cp", file, m.GetName()+":/root/bench")) }
	out := func() (time.Duration, error) {
		return timed(s.Command(ctx, "cp", m.GetName()+":/root/bench", filepath.Join(dir, "out")))
	}
	for _, d := range []struct {
		what   string
		mine   func() (time.Duration, error)
		theirs func(int64) (time.Duration, error)
	}{{"into", in, raw.upload}, {"out of", out, raw.download}} {
		mine, theirs, err := table.InTurns(copyRounds, d.mine, func() (time.Duration, error) { return d.theirs(copyBytes) })
		if err != nil {
			return err
		}
		r := table.Ratio(theirs, mine)
		t.Add(table.Row{
			What: "`cp` of 256 MiB " + d.what + " a machine", Measured: table.Rate(copyBytes, mine), Against: "plain bytes through the port: " + table.Rate(copyBytes, theirs),
			Ratio: r, Target: "≥ 0.3 ×", Met: r >= 0.3,
		})
	}
	_, err = s.Exec(ctx, m.GetName(), "rm", "/root/bench")
	return err
}

func randomFile(path string, size int64) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.CopyN(f, rand.Reader, size)
	return err
}
