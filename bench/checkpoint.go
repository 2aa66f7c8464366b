//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/client"
)

const (
	checkpointRounds = 3
	copyTarget       = 60 // ms
	syncTarget       = 4
)

// measureCheckpoint takes stopped checkpoints of a small and of a large disk.
func measureCheckpoint(ctx context.Context, s *stage.Stage, t *table.Table) error {
	if err := smallImage(ctx, s); err != nil {
		return err
	}
	for _, c := range []struct {
		what, image, fill string
		disk              int64
	}{
		{"1 GiB disk", "small", "", 1 << 30},
		{"32 GiB disk with 4 GiB of data", "debian", "yes holdpoint | head -c 4G > /root/data && sync", 32 << 30},
	} {
		m, _, err := s.Machine(ctx, "disk", c.image, &holdpointv1.Spec{DiskBytes: c.disk})
		if err != nil {
			return err
		}
		if c.fill != "" {
			fmt.Fprintln(s.Log, "writing 4 GiB in the guest …")
			if _, err := s.Exec(ctx, m.GetName(), "sh", "-c", c.fill); err != nil {
				return err
			}
		}
		if err := checkpointRow(ctx, s, t, c.what, m); err != nil {
			return err
		}
		if err := s.Remove(ctx, m.GetName()); err != nil {
			return err
		}
	}
	return nil
}

// smallImage builds the image with a 1 GiB disk, from the packages that are
// cached from the other one.
func smallImage(ctx context.Context, s *stage.Stage) error {
	fmt.Fprintln(s.Log, "building an image with a 1 GiB disk …")
	_, _, err := s.Operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return s.Client.Images.Build(ctx, connect.NewRequest(&holdpointv1.BuildImageRequest{
			RequestId: client.NewRequestID(), Recipe: "debian", Name: "small", DiskBytes: 1 << 30,
		}))
	})
	return err
}

func checkpointRow(ctx context.Context, s *stage.Stage, t *table.Table, what string, m *holdpointv1.Machine) error {
	var copies, stops, boots []float64
	for range checkpointRounds {
		// Each has something to keep.
		if _, err := s.Exec(ctx, m.GetName(), "sh", "-c", "head -c 8M /dev/urandom > /root/change"); err != nil {
			return err
		}
		r, _, err := stoppedCheckpoint(ctx, s, m.GetName())
		if err != nil {
			return err
		}
		copies, stops, boots = append(copies, r.GetCopyMs()), append(stops, r.GetStopMs()), append(boots, r.GetBootMs())
	}
	syncs, err := countSyncs(ctx, s, m.GetName())
	if err != nil {
		return err
	}
	part := table.Median(copies)
	t.Add(table.Row{
		What: "`stopped` checkpoint, copy part, " + what, Measured: fmt.Sprintf("%.1f ms, %d syncs", part, syncs),
		Target: fmt.Sprintf("≤ %d ms, ≤ %d syncs", copyTarget, syncTarget), Met: part <= copyTarget && syncs <= syncTarget,
		Phases: fmt.Sprintf("stop %.0f ms, copy %.1f ms, boot %.0f ms", table.Median(stops), part, table.Median(boots)),
	})
	return nil
}

func stoppedCheckpoint(ctx context.Context, s *stage.Stage, name string) (*holdpointv1.CheckpointResult, []stage.Step, error) {
	op, steps, err := s.Operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return s.Client.Checkpoints.Create(ctx, connect.NewRequest(&holdpointv1.CreateCheckpointRequest{
			RequestId: client.NewRequestID(), Machine: name, Kind: "disk", Mode: "stopped",
		}))
	})
	return op.GetResult().GetCheckpoint(), steps, err
}

// countSyncs takes one more checkpoint with the daemon's system calls traced,
// and counts its syncs from the exit of QEMU to the phase after the copy. The
// commit that records that phase is among them.
func countSyncs(ctx context.Context, s *stage.Stage, name string) (int, error) {
	status, err := s.Client.Daemon.Status(ctx, connect.NewRequest(&holdpointv1.DaemonStatusRequest{}))
	if err != nil {
		return 0, err
	}
	m, err := s.Client.Machines.Get(ctx, connect.NewRequest(&holdpointv1.GetMachineRequest{Machine: name}))
	if err != nil {
		return 0, err
	}
	exited, err := exitTime(ctx, int(m.Msg.GetQemuPid()))
	if err != nil {
		return 0, err
	}
	trace := filepath.Join(s.Home.Dir(), "bench.strace")
	strace := exec.CommandContext(ctx, "strace", "-f", "-ttt", "-e", "trace=fsync,fdatasync,sync_file_range,syncfs,sync",
		"-o", trace, "-p", strconv.FormatInt(status.Msg.GetPid(), 10))
	told, err := strace.StderrPipe()
	if err != nil {
		return 0, err
	}
	if err := strace.Start(); err != nil {
		return 0, fmt.Errorf("trace the daemon: %w; run make setup", err)
	}
	if line, err := bufio.NewReader(told).ReadString('\n'); err != nil || !strings.Contains(line, "attached") {
		return 0, errors.Join(fmt.Errorf("trace the daemon: %q: %w", line, err), strace.Wait())
	}
	_, steps, err := stoppedCheckpoint(ctx, s, name)
	threads, err2 := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", status.Msg.GetPid()))
	err = errors.Join(err, err2, strace.Process.Signal(syscall.SIGINT))
	_ = strace.Wait() // it reports our own signal
	if err != nil {
		return 0, err
	}
	begin := <-exited
	for i, st := range steps[:len(steps)-1] {
		if st.At.Before(begin) && steps[i+1].At.After(begin) {
			return syncsBetween(trace, threads, begin, steps[i+1].At)
		}
	}
	return 0, errors.New("count syncs: QEMU did not exit during the checkpoint")
}

// exitTime sends the time at which a process has ended.
func exitTime(ctx context.Context, pid int) (<-chan time.Time, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("watch QEMU, process %d: %w", pid, err)
	}
	exited := make(chan time.Time, 1)
	go func() { // ends with QEMU, or with the run of the benchmark
		defer func() { _ = unix.Close(fd) }()
		const look = 1000 // ms
		for ctx.Err() == nil {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, look)
			if n > 0 || err != nil && err != unix.EINTR {
				break
			}
		}
		exited <- time.Now()
	}()
	return exited, nil
}

// syncsBetween counts the traced calls of the threads in the given time.
func syncsBetween(trace string, threads []string, from, to time.Time) (int, error) {
	mine := make(map[string]bool)
	for _, t := range threads {
		mine[filepath.Base(t)] = true
	}
	text, err := os.ReadFile(trace)
	if err != nil {
		return 0, err
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		// PID SECONDS.MICROSECONDS fsync(7) = 0
		f := strings.Fields(line)
		if len(f) < 3 || !mine[f[0]] || !strings.Contains(f[2], "sync") || strings.HasPrefix(f[2], "<...") {
			continue
		}
		seconds, err := strconv.ParseFloat(f[1], 64)
		if err != nil {
			continue
		}
		at := time.UnixMicro(int64(seconds * 1e6))
		if at.After(from) && at.Before(to) {
			n++
		}
	}
	return n, nil
}
