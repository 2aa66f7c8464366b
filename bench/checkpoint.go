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
	"github.com/holdpoint/holdpoint/client"
)

const (
	checkpointRounds = 3
	copyTarget       = 60 // ms
	syncTarget       = 4
)

// measureCheckpoint takes stopped checkpoints of a small and of a large disk.
func measureCheckpoint(ctx context.Context, s *stage, t *table) error {
	if err := s.smallImage(ctx); err != nil {
		return err
	}
	for _, c := range []struct {
		what, image, fill string
		disk              int64
	}{
		{"1 GiB disk", "small", "", 1 << 30},
		{"32 GiB disk with 4 GiB of data", "debian", "yes holdpoint | head -c 4G > /root/data && sync", 32 << 30},
	} {
		m, _, err := s.machine(ctx, "disk", c.image, &holdpointv1.Spec{DiskBytes: c.disk})
		if err != nil {
			return err
		}
		if c.fill != "" {
			fmt.Fprintln(s.log, "writing 4 GiB in the guest …")
			if _, err := s.exec(ctx, m.GetName(), "sh", "-c", c.fill); err != nil {
				return err
			}
		}
		if err := s.checkpointRow(ctx, t, c.what, m); err != nil {
			return err
		}
		if err := s.remove(ctx, m.GetName()); err != nil {
			return err
		}
	}
	return nil
}

// smallImage builds the image with a 1 GiB disk, from the packages that are
// cached from the other one.
func (s *stage) smallImage(ctx context.Context) error {
	fmt.Fprintln(s.log, "building an image with a 1 GiB disk …")
	_, _, err := s.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return s.client.Images.Build(ctx, connect.NewRequest(&holdpointv1.BuildImageRequest{
			RequestId: client.NewRequestID(), Recipe: "debian", Name: "small", DiskBytes: 1 << 30,
		}))
	})
	return err
}

func (s *stage) checkpointRow(ctx context.Context, t *table, what string, m *holdpointv1.Machine) error {
	var copies, stops, boots []float64
	for range checkpointRounds {
		// Each has something to keep.
		if _, err := s.exec(ctx, m.GetName(), "sh", "-c", "head -c 8M /dev/urandom > /root/change"); err != nil {
			return err
		}
		r, _, err := s.stoppedCheckpoint(ctx, m.GetName())
		if err != nil {
			return err
		}
		copies, stops, boots = append(copies, r.GetCopyMs()), append(stops, r.GetStopMs()), append(boots, r.GetBootMs())
	}
	syncs, err := s.countSyncs(ctx, m.GetName())
	if err != nil {
		return err
	}
	part := median(copies)
	t.add(row{
		What: "`stopped` checkpoint, copy part, " + what, Measured: fmt.Sprintf("%.1f ms, %d syncs", part, syncs),
		Target: fmt.Sprintf("≤ %d ms, ≤ %d syncs", copyTarget, syncTarget), Met: part <= copyTarget && syncs <= syncTarget,
		Phases: fmt.Sprintf("stop %.0f ms, copy %.1f ms, boot %.0f ms", median(stops), part, median(boots)),
	})
	return nil
}

func (s *stage) stoppedCheckpoint(ctx context.Context, name string) (*holdpointv1.CheckpointResult, []step, error) {
	op, steps, err := s.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return s.client.Checkpoints.Create(ctx, connect.NewRequest(&holdpointv1.CreateCheckpointRequest{
			RequestId: client.NewRequestID(), Machine: name, Kind: "disk", Mode: "stopped",
		}))
	})
	return op.GetResult().GetCheckpoint(), steps, err
}

// countSyncs takes one more checkpoint with the daemon's system calls traced,
// and counts its syncs from the exit of QEMU to the phase after the copy. The
// commit that records that phase is among them.
func (s *stage) countSyncs(ctx context.Context, name string) (int, error) {
	status, err := s.client.Daemon.Status(ctx, connect.NewRequest(&holdpointv1.DaemonStatusRequest{}))
	if err != nil {
		return 0, err
	}
	m, err := s.client.Machines.Get(ctx, connect.NewRequest(&holdpointv1.GetMachineRequest{Machine: name}))
	if err != nil {
		return 0, err
	}
	exited, err := exitTime(ctx, int(m.Msg.GetQemuPid()))
	if err != nil {
		return 0, err
	}
	trace := filepath.Join(s.home.Dir(), "bench.strace")
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
	_, steps, err := s.stoppedCheckpoint(ctx, name)
	threads, err2 := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", status.Msg.GetPid()))
	err = errors.Join(err, err2, strace.Process.Signal(syscall.SIGINT))
	_ = strace.Wait() // it reports our own signal
	if err != nil {
		return 0, err
	}
	begin := <-exited
	for i, st := range steps[:len(steps)-1] {
		if st.at.Before(begin) && steps[i+1].at.After(begin) {
			return syncsBetween(trace, threads, begin, steps[i+1].at)
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
