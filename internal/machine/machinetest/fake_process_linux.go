package machinetest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/machine"
)

// identify says which process has the pid now.
func identify(pid int) (machine.Process, error) {
	_, start, err := readStat(pid)
	if err != nil {
		return machine.Process{}, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return machine.Process{PID: pid, StartTime: start, BootID: strings.TrimSpace(string(boot))}, err
}

// readStat gives the parent and the start time of a process: fields 4 and 22
// of /proc/PID/stat, proc(5).
func readStat(pid int) (parent int, start uint64, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// The name in field 2 may hold anything; it ends at the last parenthesis.
	text := string(data)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return 0, 0, fmt.Errorf("read /proc/%d/stat: too short", pid)
	}
	parent, err = strconv.Atoi(fields[1])
	if err != nil {
		return 0, 0, err
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return parent, start, err
}

// descendants gives the processes below pid.
func descendants(pid int) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	for _, e := range entries {
		if p, err := strconv.Atoi(e.Name()); err == nil {
			if parent, _, err := readStat(p); err == nil {
				children[parent] = append(children[parent], p)
			}
		}
	}
	found := children[pid]
	for i := 0; i < len(found); i++ {
		found = append(found, children[found[i]]...)
	}
	return found, nil
}

// awaitProcess waits until a process is gone, whoever reaps it.
func awaitProcess(pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(fds, -1); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// stopTree stops all descendants of a process and returns when they stand
// still. A signal alone lets a system call that is under way finish first.
func stopTree(pid int) error {
	var done []int
	for {
		pids, err := descendants(pid)
		if err != nil {
			return err
		}
		fresh := slices.DeleteFunc(pids, func(p int) bool { return slices.Contains(done, p) })
		if len(fresh) == 0 {
			return nil
		}
		for _, p := range fresh {
			if err := unix.Kill(p, unix.SIGSTOP); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("stop process %d: %w", p, err)
			}
		}
		for _, p := range fresh {
			if err := awaitStopped(p); err != nil {
				return err
			}
		}
		done = append(done, fresh...)
	}
}

// awaitStopped waits until all threads of a process stand still. The kernel
// has no event for it but for the process's parent. A thread that waits for the
// child of its vfork, which may be stopped already, counts as one that does.
func awaitStopped(pid int) error {
	const (
		limit      = 5 * time.Second
		vforkLimit = 20 * time.Millisecond
	)
	for begun := time.Now(); ; time.Sleep(200 * time.Microsecond) {
		states, err := threadStates(pid)
		if err != nil {
			return err
		}
		if strings.Trim(states, "TtZXx") == "" || strings.Trim(states, "TtZXxD") == "" && time.Since(begun) > vforkLimit {
			return nil
		}
		if time.Since(begun) > limit {
			return fmt.Errorf("stop process %d: its threads are in states %q after %s", pid, states, limit)
		}
	}
}

// threadStates are the letters of field 3 of /proc/PID/task/TID/stat, proc(5),
// of all threads; none of a process that is gone.
func threadStates(pid int) (string, error) {
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return "", err
	}
	var states strings.Builder
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		if at := bytes.LastIndex(data, []byte(") ")); at >= 0 && at+2 < len(data) {
			states.WriteByte(data[at+2])
		}
	}
	return states.String(), nil
}

// signalTree sends sig to all descendants of a process, not to itself, until
// no new ones appear.
func signalTree(pid int, sig unix.Signal) error {
	var done []int
	for {
		fresh := false
		pids, err := descendants(pid)
		if err != nil {
			return err
		}
		for _, p := range pids {
			if slices.Contains(done, p) {
				continue
			}
			fresh = true
			done = append(done, p)
			if err := unix.Kill(p, sig); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("signal process %d: %w", p, err)
			}
		}
		if !fresh {
			return nil
		}
	}
}
