//go:build linux

// Package meter measures what machines use: of the host, by what the kernel tells
// of their processes and files, and of their own, by what their guests say. It
// wakes no machine and holds none up.
package meter

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

const (
	// span is how long CPU time is looked at.
	span = 400 * time.Millisecond
	// askTimeout bounds each question to a monitor or guest.
	askTimeout = time.Second
)

// Config is what Measure works with.
type Config struct {
	Catalog *catalog.Catalog
	Keeper  *keeper.Keeper
	// Path is the file of a layer.
	Path func(catalog.Layer) string
}

// Measure measures the machines, all at the same time.
func Measure(ctx context.Context, cfg Config, machines []catalog.Machine) ([]*holdpointv1.MachineStats, error) {
	stats, errs := make([]*holdpointv1.MachineStats, len(machines)), make([]error, len(machines))
	var wg sync.WaitGroup
	for i, m := range machines {
		run := cfg.Keeper.Run(m.ID)
		stats[i] = &holdpointv1.MachineStats{Id: m.ID, Name: m.Name, State: string(keeper.State(m, run))}
		wg.Go(func() {
			stats[i].DiskBytes, errs[i] = diskOf(ctx, cfg, m)
			if run != nil && !run.Ended() && run.Lost() == nil {
				measure(ctx, run, stats[i])
			}
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("measure machine %s: %w", machines[i].Name, err)
		}
	}
	return stats, nil
}

// diskOf is what the layers of the machine's disk take on the host.
func diskOf(ctx context.Context, cfg Config, m catalog.Machine) (int64, error) {
	chain, err := cfg.Catalog.Chain(ctx, m.ID)
	if err != nil {
		return 0, err
	}
	total := int64(0)
	for _, layer := range chain {
		if n, err := disk.Allocated(cfg.Path(layer)); err == nil { // it may have been merged away meanwhile
			total += n
		}
	}
	return total, nil
}

// measure fills in what a run uses.
func measure(ctx context.Context, run *fleet.Run, s *holdpointv1.MachineStats) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { askGuest(ctx, run, s) })
	began := time.Now()
	before, err := ask(ctx, run)
	if err != nil {
		return
	}
	if ready := before.ready; ready > 0 {
		s.UpMillis = time.Since(time.Unix(0, ready)).Milliseconds()
	}
	s.MemoryBytes = private(before.pid)
	select {
	case <-time.After(time.Until(began.Add(span))):
	case <-ctx.Done():
		return
	}
	after, err := ask(ctx, run)
	if passed := after.at.Sub(before.at); err == nil && passed > 0 && after.pid == before.pid {
		s.CpuPercent = 100 * float64(after.cpu-before.cpu) / float64(passed)
	}
}

// reading is what a monitor says of its process.
type reading struct {
	at    time.Time
	cpu   time.Duration
	pid   int64
	ready int64
}

func ask(ctx context.Context, run *fleet.Run) (reading, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	status, err := run.StatusNow(ctx)
	return reading{time.Now(), time.Duration(status.GetCpuNano()), status.GetQemuPid(), status.GetReadyUnixNano()}, err
}

// askGuest fills in what the guest says of itself.
func askGuest(ctx context.Context, run *fleet.Run, s *holdpointv1.MachineStats) {
	switch {
	case s.State == string(machine.Paused):
		s.Silent = "it is paused"
		return
	case run.Monitor() == nil:
		s.Silent = "its monitor is not there yet"
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answer, err := run.Agent().Usage(ctx, connect.NewRequest(&agentv1.UsageRequest{}))
	switch {
	case connect.CodeOf(err) == connect.CodeUnimplemented:
		s.Silent = "its guest agent is older than this; it is replaced when an image is built anew"
	case ctx.Err() != nil:
		s.Silent = fmt.Sprintf("it did not answer within %s", askTimeout)
	case err != nil:
		s.Silent = wire.Decode(err).Error()
	default:
		u := answer.Msg
		s.GuestMemoryBytes = number(u.GetMemoryBytes())
		s.GuestUsedBytes = max(s.GuestMemoryBytes-number(u.GetMemoryAvailableBytes()), 0)
		s.ReceivedBytes, s.SentBytes = number(u.GetReceivedBytes()), number(u.GetSentBytes())
	}
}

// number is what a guest says, which may be anything, as a count that is none less
// than nothing.
func number(said uint64) int64 { return int64(min(said, math.MaxInt64)) }

// private is the memory that only this process has: what it has written, in the
// host's memory or swapped out (proc(5), RssAnon and VmSwap).
func private(pid int64) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0 // it has just ended
	}
	return kilobytes(text, "RssAnon:") + kilobytes(text, "VmSwap:")
}

// kilobytes is the value of a line of /proc/PID/status, in bytes; 0 for none.
func kilobytes(text []byte, name string) int64 {
	for line := range bytes.Lines(text) {
		if rest, found := bytes.CutPrefix(line, []byte(name)); found {
			fields := bytes.Fields(rest)
			if len(fields) > 0 {
				n, _ := strconv.ParseInt(string(fields[0]), 10, 64) // 0 where the kernel speaks otherwise
				return n << 10
			}
		}
	}
	return 0
}
