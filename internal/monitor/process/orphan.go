//go:build linux

package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// runMark is the environment variable that all processes begun for a run
// inherit, so that one that was started but not recorded can be found.
const runMark = "HOLDPOINT_RUN_ID"

func markChildren(runID string) error {
	if err := os.Setenv(runMark, runID); err != nil {
		return fmt.Errorf("mark children of run %s: %w", runID, err)
	}
	return nil
}

// killOrphan ends the processes that carry the mark of the run and proves
// their exit. A monitor carries none of its own run: the mark in
// /proc/PID/environ is that of the process's start.
func killOrphan(ctx context.Context, runID string) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return fmt.Errorf("look for processes of run %s: %w", runID, err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() || !marked(pid, runID) {
			continue
		}
		if err := killMarked(ctx, pid, runID); err != nil {
			return err
		}
	}
	return nil
}

func marked(pid int, runID string) bool {
	env, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	if err != nil {
		return false // gone, or not ours
	}
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if string(kv) == runMark+"="+runID {
			return true
		}
	}
	return false
}

func killMarked(ctx context.Context, pid int, runID string) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d of run %s: %w", pid, runID, err)
	}
	defer unix.Close(fd)
	if !marked(pid, runID) {
		return nil // the pid was reused before the pidfd was open
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d of run %s: %w", pid, runID, err)
	}
	return awaitPidfd(ctx, fd, pid)
}

// awaitPidfd waits until the process of the pidfd has ended.
func awaitPidfd(ctx context.Context, fd, pid int) error {
	const slice = 100 // ms between looks at ctx; the exit itself wakes at once
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for ctx.Err() == nil {
		n, err := unix.Poll(fds, slice)
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("await exit of process %d: %w", pid, err)
		}
	}
	return errdefs.New(errdefs.Deadline, "process %d does not end after SIGKILL: %w", pid, ctx.Err())
}
