package machinetest

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

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
