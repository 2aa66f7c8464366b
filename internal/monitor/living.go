//go:build linux

package monitor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// The marks are environment variables, which the kernel keeps for the life of a
// process (/proc/PID/environ, proc(5)): they find processes that no file knows
// of. All that a monitor starts has runMark, with the run's folder; the monitor
// itself has monitorMark from its starter. idMark names the run that a process
// was begun for, for people.
const (
	runMark     = "HOLDPOINT_RUN_DIR"
	idMark      = "HOLDPOINT_RUN_ID"
	monitorMark = "HOLDPOINT_MONITOR_DIR"
)

// MarkChildren makes all processes that this one starts from now on known as
// those of the run's folder dir, now with the run id runID. Only a monitor
// calls it. It does not mark the caller: its own mark is that of its start.
func MarkChildren(dir, runID string) error {
	err := errors.Join(os.Setenv(runMark, dir), os.Setenv(idMark, runID), os.Unsetenv(monitorMark))
	if err != nil {
		return fmt.Errorf("mark children of run %s: %w", runID, err)
	}
	return nil
}

// unmarked is env without our marks.
func unmarked(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		key, _, _ := strings.Cut(kv, "=")
		return key == runMark || key == idMark || key == monitorMark
	})
}

// Living gives the ids of the processes that the run in the folder dir has: all
// that its monitors started, whichever of its runs it was for, and the one of
// its record. None is the proof that the machine stands still, as far as this
// host and user go. The monitor is not among them, and no other file in the
// folder needs to be there or sound.
func Living(dir string) ([]int, error) {
	pids, err := find(dir, runMark)
	if err != nil {
		return nil, err
	}
	if pid, ok := recorded(dir); ok && !slices.Contains(pids, pid) {
		pids = append(pids, pid)
	}
	return pids, nil
}

// EndLiving ends, as a power cut would, all that Living finds, and proves it.
func EndLiving(ctx context.Context, dir string) error {
	return endAll(ctx, dir, func() ([]int, error) { return Living(dir) })
}

// endAll kills what list finds until it finds nothing: what was just being
// started when we looked is found the next time.
func endAll(ctx context.Context, dir string, list func() ([]int, error)) error {
	for {
		pids, err := list()
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			still := func() (bool, error) {
				now, err := list()
				return slices.Contains(now, pid), err
			}
			if err := endProcess(ctx, pid, still); err != nil {
				return fmt.Errorf("end processes of %q: %w", dir, err)
			}
		}
	}
}

// endProcess kills the process and proves its end. still is asked once the
// process cannot come to mean another: the pid may have been reused before.
func endProcess(ctx context.Context, pid int, still func() (bool, error)) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if ours, err := still(); err != nil || !ours {
		return err
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	return awaitEnd(ctx, fd, pid)
}

// awaitEnd waits until all threads of the pidfd's process have ended.
func awaitEnd(ctx context.Context, fd, pid int) error {
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

// AwaitEnd waits for the end of the process pid, which need not be a child.
func AwaitEnd(ctx context.Context, pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	return awaitEnd(ctx, fd, pid)
}

// find gives the processes, but for this one, whose mark names the folder.
func find(dir, mark string) (pids []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("look for processes of %q: %w", dir, err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err == nil && pid != os.Getpid() && carries(pid, dir, mark) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// carries reports whether any thread of the process carries the mark. When the
// first thread has ended and others have not, only theirs can be read.
func carries(pid int, dir, mark string) bool {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	env, err := os.ReadFile(filepath.Join(proc, "environ"))
	if err == nil && len(env) == 0 {
		threads, _ := os.ReadDir(filepath.Join(proc, "task")) // gone meanwhile: none
		for _, thread := range threads {
			if env, err = os.ReadFile(filepath.Join(proc, "task", thread.Name(), "environ")); err == nil && len(env) > 0 {
				break
			}
		}
	}
	if err != nil {
		return false // gone, or not ours
	}
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if at, ok := bytes.CutPrefix(kv, []byte(mark+"=")); ok {
			return sameDir(string(at), dir)
		}
	}
	return false
}

// sameDir reports whether the paths name one folder, by whichever way.
func sameDir(a, b string) bool {
	if filepath.Clean(a) == filepath.Clean(b) {
		return true
	}
	aInfo, aErr := os.Stat(a)
	bInfo, bErr := os.Stat(b)
	return aErr == nil && bErr == nil && os.SameFile(aInfo, bInfo)
}

// recorded gives the process of the folder's record, if it lives.
func recorded(dir string) (pid int, lives bool) {
	rec, err := ReadRecord(dir)
	if err != nil || rec.Process == nil {
		return 0, false
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil || strings.TrimSpace(string(boot)) != rec.Process.BootID {
		return 0, false
	}
	pid = rec.Process.PID
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, false
	}
	defer unix.Close(fd)
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// The name, in parentheses, may hold anything; field 3 is the first behind it.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 || string(fields[19]) != strconv.FormatUint(rec.Process.StartTime, 10) {
		return 0, false
	}
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return pid, err != nil || n == 0
}
