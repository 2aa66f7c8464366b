//go:build linux

package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

// process is a handle on one process that cannot come to mean another.
type process struct {
	id    machine.Process
	pidfd *os.File
	conn  rawConn
}

type rawConn interface {
	Control(f func(fd uintptr)) error
	Read(f func(fd uintptr) (done bool)) error
}

var errGone = errors.New("the process has ended")

// openProcess opens the process pid and says which it is. A zombie is gone.
func openProcess(pid int) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil, errGone
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
			return &process{id: id, pidfd: file, conn: conn}, nil
		}
	}
	return nil, errors.Join(err, file.Close())
}

// wait returns when the process has ended, or with an error after close. The
// status is that of our own child, nil when it went to another parent.
func (p *process) wait() (*unix.WaitStatus, error) {
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

func (p *process) signal(sig unix.Signal) error {
	var sent error
	err := p.conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	return errors.Join(err, sent)
}

func (p *process) close() error { return p.pidfd.Close() }

// killAndWait ends a child whose launch failed.
func (p *process) killAndWait() {
	_ = p.signal(unix.SIGKILL) // it may have ended by itself
	_, _ = p.wait()
	_ = p.close()
}

// identify reads which process has the pid now.
func identify(pid int) (machine.Process, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return machine.Process{}, errGone
	}
	// The name, in parentheses, may hold anything; fields count from behind it.
	i := bytes.LastIndexByte(b, ')')
	fields := strings.Fields(string(b[i+1:]))
	if i < 0 || len(fields) < 20 {
		return machine.Process{}, fmt.Errorf("read start time of process %d: unknown form", pid)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return machine.Process{}, errGone
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

// inotify watches files for changes until it is closed.
type inotify struct{ file *os.File }

func watchFiles(paths ...string) (*inotify, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("watch files: %w", err)
	}
	n := &inotify{file: os.NewFile(uintptr(fd), "inotify")}
	for _, path := range paths {
		if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY); err != nil {
			return nil, errors.Join(fmt.Errorf("watch %q: %w", path, err), n.file.Close())
		}
	}
	return n, nil
}

// wait returns when something has changed since the last call, or ctx ends.
func (n *inotify) wait(ctx context.Context) error {
	buf := make([]byte, 4096)
	stop := context.AfterFunc(ctx, func() { _ = n.file.Close() })
	defer stop()
	_, err := n.file.Read(buf)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

func (n *inotify) close() { _ = n.file.Close() }
