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
)

const (
	execRounds = 40
	forkRounds = 200
	copyRounds = 3
	copyBytes  = 256 << 20
)

// measureExec compares an exec through the daemon with what it cannot be
// below: the guest's own fork and exec, and one round trip of the link.
func measureExec(ctx context.Context, s *stage, t *table) error {
	m, err := s.shared(ctx)
	if err != nil {
		return err
	}
	mon, err := s.monitor(ctx, m)
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
		_, err := s.exec(ctx, m.GetName(), "true")
		return time.Since(begin), err
	}
	cli := func() (time.Duration, error) { return timed(s.command(ctx, "exec", m.GetName(), "--", "true")) }
	version := func() (time.Duration, error) { return timed(s.command(ctx, "version")) }

	mine, trip, err := inTurns(execRounds, api, ping)
	if err != nil {
		return err
	}
	process, start, err := inTurns(execRounds/2, cli, version)
	if err != nil {
		return err
	}
	fork, err := forkExec(ctx, s, m.GetName())
	if err != nil {
		return err
	}
	least := fork + trip
	r := ratio(mine, least)
	t.add(row{
		What: "`exec -- true`, a call of the API", Measured: ms(mine), Against: "fork+exec in the guest + link round trip: " + ms(least),
		Ratio: r, Target: "≤ 1.5 ×", Met: r <= 1.5, Phases: fmt.Sprintf("fork+exec %s, round trip %s", ms(fork), ms(trip)),
	})
	whole := ratio(process, least+start)
	t.add(row{
		What: "`holdpoint exec -- true`, whole process", Measured: ms(process), Against: "the same + start of the process: " + ms(least+start),
		Ratio: whole, Phases: "start of the process " + ms(start),
	})
	return nil
}

// forkExec is what the guest itself takes to fork, run true and wait for it,
// by its own clock.
func forkExec(ctx context.Context, s *stage, name string) (time.Duration, error) {
	script := fmt.Sprintf("import os,time\n"+
		"def once():\n p=os.fork()\n if p==0: os.execv('/bin/true',['true'])\n os.waitpid(p,0)\n"+
		"ts=[]\nfor i in range(%d):\n b=time.monotonic_ns(); once(); ts.append(time.monotonic_ns()-b)\nprint(sorted(ts)[len(ts)//2])", forkRounds)
	out, err := s.exec(ctx, name, "python3", "-c", script)
	if err != nil {
		return 0, err
	}
	ns, err := strconv.ParseInt(strings.TrimSpace(out), 10, 64)
	return time.Duration(ns), err
}

// measureCopy compares cp in both directions with a plain byte stream through
// an equal port of an equal machine.
func measureCopy(ctx context.Context, s *stage, t *table) (err error) {
	m, err := s.shared(ctx)
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
	in := func() (time.Duration, error) { return timed(s.command(ctx, "cp", file, m.GetName()+":/root/bench")) }
	out := func() (time.Duration, error) {
		return timed(s.command(ctx, "cp", m.GetName()+":/root/bench", filepath.Join(dir, "out")))
	}
	for _, d := range []struct {
		what   string
		mine   func() (time.Duration, error)
		theirs func(int64) (time.Duration, error)
	}{{"into", in, raw.upload}, {"out of", out, raw.download}} {
		mine, theirs, err := inTurns(copyRounds, d.mine, func() (time.Duration, error) { return d.theirs(copyBytes) })
		if err != nil {
			return err
		}
		r := ratio(theirs, mine)
		t.add(row{
			What: "`cp` of 256 MiB " + d.what + " a machine", Measured: rate(copyBytes, mine), Against: "plain bytes through the port: " + rate(copyBytes, theirs),
			Ratio: r, Target: "≥ 0.3 ×", Met: r >= 0.3,
		})
	}
	_, err = s.exec(ctx, m.GetName(), "rm", "/root/bench")
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
