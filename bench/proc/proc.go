//go:build linux

// Package proc reads from /proc what processes have used. It measures nothing
// by itself.
package proc

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// clockTicks is the unit of CPU times in /proc/PID/stat per second: 100
// on every Linux/x86 (USER_HZ, proc_pid_stat(5)).
const clockTicks = 100

// CPU is the CPU time of a process so far.
func CPU(pid int64) (time.Duration, error) {
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
	return time.Duration(user+system) * time.Second / clockTicks, errors.Join(err, err2)
}

// Resident is a process's resident memory in bytes.
func Resident(pid int64) (int64, error) {
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

// Private is what a process has of memory that no other has, in bytes.
func Private(pid int64) (int64, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	var sum int64
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || !strings.HasPrefix(fields[0], "Private_") {
			continue
		}
		kib, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil {
			return 0, err
		}
		sum += kib << 10
	}
	if sum == 0 {
		return 0, fmt.Errorf("read /proc/%d/smaps_rollup: nothing private", pid)
	}
	return sum, lines.Err()
}
