//go:build linux

// Package system gives process 1 of a guest to the init of the guest's own
// disk, systemd, while the agent lives on beside it: it hands process 1 over,
// lays out in /run what systemd is to find there, asks it to end the guest, and
// is process 1 once more when all has ended. It changes nothing on the disk,
// serves nobody and runs no commands.
package system

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent/command"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	// program is where this program's own file is kept, in memory. systemd runs it
	// as process 1, by its second name, when it has ended everything
	// (https://systemd.io/INITRD_INTERFACE/).
	program, lastProgram = "/run/initramfs/holdpoint-agent", "/run/initramfs/shutdown"
	// BesideName and LeaveName are what the program is called in its two parts:
	// the agent, which systemd leaves alone for its first letter
	// (https://systemd.io/ROOT_STORAGE_DAEMONS/), and process 1 at the end.
	BesideName, LeaveName = "@holdpoint-agent", "/shutdown"

	// initPath is what becomes process 1.
	initPath = "/sbin/init"
	// door is the abstract socket at which process 1 calls at the end.
	door = "@holdpoint-agent"
	// powerOffSignal makes systemd start poweroff.target (systemd(1)): SIGRTMIN+4.
	powerOffSignal = unix.Signal(34 + 4)
	// heldFor is how long the end waits for an agent that has been told of it.
	heldFor = 30 * time.Second
)

// Find refuses (UNSUPPORTED) a root that has no systemd as its init.
func Find() error {
	path, err := filepath.EvalSymlinks(initPath)
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.New(errdefs.Unsupported, "the image has no init of its own, %s does not exist; use --init=agent", initPath)
	}
	if err != nil {
		return errdefs.New(errdefs.Unsupported, "find the image's init: %w; use --init=agent", err)
	}
	if filepath.Base(path) != "systemd" {
		return errdefs.New(errdefs.Unsupported, "%s is %s, and systemd is the only init that is known; use --init=agent", initPath, path)
	}
	return nil
}

// System is systemd to the agent beside it. Its life: Join; Start makes it
// process 1, AwaitReady waits until it answers; Stop has it end everything but
// this process, which then ends the guest, or lets Release do so.
type System struct {
	order, outcome *os.File
	listener       *net.UnixListener
	failed         error // of Start, which is tried once

	mu      sync.Mutex
	waiting chan struct{} // closed when process 1 calls
	caller  net.Conn      // process 1, which waits as long as it is open
}

// Join takes up what Begin, in process 1, left to this process.
func Join() (*System, error) {
	s := &System{order: os.NewFile(orderFD, "order"), outcome: os.NewFile(outcomeFD, "outcome")}
	unix.CloseOnExec(orderFD)
	unix.CloseOnExec(outcomeFD)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: door, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("await the end: %w", err)
	}
	s.listener = l
	go s.listen() // as long as the process lives
	return s, nil
}

// Start makes systemd process 1; onBoot is run once the system is up, nil for
// none. Commands that start afterwards see it. One that failed fails
// again.
func (s *System) Start(onBoot *command.Spec) error {
	if s.failed == nil {
		s.failed = s.start(onBoot)
	}
	return s.failed
}

func (s *System) start(onBoot *command.Spec) error {
	if err := Find(); err != nil {
		return err
	}
	if err := layOut("/run", onBoot); err != nil {
		return err
	}
	if _, err := s.order.Write([]byte{1}); err != nil {
		return fmt.Errorf("hand over to %s: %w", initPath, err)
	}
	// Nothing, when it has been executed.
	failure, err := io.ReadAll(s.outcome)
	if err == nil && len(failure) > 0 {
		err = errors.New(string(failure))
	}
	if err != nil {
		return fmt.Errorf("hand over to %s: %w", initPath, err)
	}
	return nil
}

// Stop asks systemd to end everything and power off, and waits until all has
// ended but this process and process 1, which waits. The error is of kind
// DEADLINE when ctx ends before.
func (s *System) Stop(ctx context.Context) error {
	arrived := make(chan struct{})
	s.mu.Lock()
	s.waiting = arrived
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.waiting = nil
		s.mu.Unlock()
	}()
	if err := PowerOff(); err != nil {
		return err
	}
	select {
	case <-arrived:
		return nil
	case <-ctx.Done():
		return errdefs.New(errdefs.Deadline, "systemd has not ended everything yet; see systemctl list-jobs")
	}
}

// PowerOff asks systemd to end everything and power off.
func PowerOff() error { return os.NewSyscallError("kill", unix.Kill(1, powerOffSignal)) }

// Release lets process 1 end the guest after Stop.
func (s *System) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.caller != nil {
		_ = s.caller.Close()
		s.caller = nil
	}
}

// listen waits for process 1 to call. If nobody has asked for the end, it is let
// go at once: somebody in the guest has.
func (s *System) listen() {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.waiting != nil && s.caller == nil && ofProcess1(conn) {
			s.caller = conn
			close(s.waiting)
			s.waiting = nil
		} else {
			_ = conn.Close()
		}
		s.mu.Unlock()
	}
}

func ofProcess1(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	yes := false
	_ = raw.Control(func(fd uintptr) {
		peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		yes = err == nil && peer.Pid == 1
	})
	return yes
}
