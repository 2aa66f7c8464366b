//go:build linux

// Package process holds on to one process that its parent may leave to
// another: it waits for its end, ends it, talks to it alone, and lets others
// look into it. It knows nothing of QEMU.
package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

// Process is a handle on one process that cannot come to mean another.
type Process struct {
	id    machine.Process
	pidfd *os.File
	conn  rawConn
}

type rawConn interface {
	Control(f func(fd uintptr)) error
	Read(f func(fd uintptr) (done bool)) error
}

// ErrGone is the error of a process that has ended.
var ErrGone = errors.New("the process has ended")

// Open opens the process pid and says which it is. A zombie is gone.
func Open(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	// Non-blocking, so that waiting for it takes no thread.
	file := os.NewFile(uintptr(fd), "pidfd")
	id, err := identify(pid)
	if err == nil {
		var conn rawConn
		if conn, err = file.SyscallConn(); err == nil {
			return &Process{id: id, pidfd: file, conn: conn}, nil
		}
	}
	return nil, errors.Join(err, file.Close())
}

// ID says which process it is.
func (p *Process) ID() machine.Process { return p.id }

// Wait returns when the process has ended, or with an error after Close. The
// status is that of our own child, nil when it went to another parent.
func (p *Process) Wait() (*unix.WaitStatus, error) {
	err := p.conn.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		return err == nil && n == 1
	})
	if err != nil {
		return nil, fmt.Errorf("await process %d: %w", p.id.PID, err)
	}
	var status unix.WaitStatus
	pid, err := unix.Wait4(p.id.PID, &status, unix.WNOHANG, nil)
	if err != nil || pid != p.id.PID {
		return nil, nil //nolint:nilerr // not our child: the status went elsewhere
	}
	return &status, nil
}

// Signal sends one; ESRCH when the process has ended.
func (p *Process) Signal(sig unix.Signal) error {
	var sent error
	err := p.conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	return errors.Join(err, sent)
}

// Close lets go of the process and ends Wait.
func (p *Process) Close() error { return p.pidfd.Close() }

// KillAndWait ends a child whose launch failed.
func (p *Process) KillAndWait() {
	_ = p.Signal(unix.SIGKILL) // it may have ended by itself
	_, _ = p.Wait()
	_ = p.Close()
}

// identify reads which process has the pid now.
func identify(pid int) (machine.Process, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return machine.Process{}, ErrGone
	}
	// The name, in parentheses, may hold anything; fields count from behind it.
	i := bytes.LastIndexByte(b, ')')
	fields := strings.Fields(string(b[i+1:]))
	if i < 0 || len(fields) < 20 {
		return machine.Process{}, fmt.Errorf("read start time of process %d: unknown form", pid)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return machine.Process{}, ErrGone
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return machine.Process{}, fmt.Errorf("read start time of process %d: %w", pid, err)
	}
	boot, err := host.BootID()
	if err != nil {
		return machine.Process{}, err
	}
	return machine.Process{PID: pid, StartTime: start, BootID: boot}, nil
}

// AwaitEnd waits for the process to end, no longer than limit, and leaves its
// status to be reaped.
func (p *Process) AwaitEnd(limit time.Duration) bool {
	_ = p.pidfd.SetReadDeadline(time.Now().Add(limit))
	defer func() { _ = p.pidfd.SetReadDeadline(time.Time{}) }()
	ended := false
	_ = p.conn.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		ended = err == nil && n == 1
		return ended
	})
	return ended
}
