//go:build linux

package system

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent/filesystems"
)

// The descriptors that the agent inherits from process 1.
const (
	orderFD   = 3
	outcomeFD = 4
)

// Begin starts the agent beside process 1, which this is, and becomes the guest's
// own init when the agent says so. It returns only if that fails.
func Begin() error {
	if err := keepProgram(); err != nil {
		return err
	}
	order, outcome, err := startAgent()
	if err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	var word [1]byte
	if _, err := order.Read(word[:]); err != nil {
		return errors.New("the agent has ended")
	}
	// As the kernel starts it.
	err = unix.Exec(initPath, []string{initPath}, []string{"HOME=/", "TERM=linux"})
	_, _ = io.WriteString(outcome, err.Error()) // it goes to the host from there
	_ = outcome.Close()
	_, _ = io.Copy(io.Discard, order)
	return fmt.Errorf("execute %s: %w", initPath, err)
}

// keepProgram copies this program's own file to where it outlives the initramfs.
func keepProgram() error {
	if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
		return fmt.Errorf("keep the agent in memory: %w", err)
	}
	from, err := os.Open("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("keep the agent in memory: %w", err)
	}
	defer from.Close()
	to, err := os.OpenFile(program, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o700)
	if err != nil {
		return fmt.Errorf("keep the agent in memory: %w", err)
	}
	_, err = io.Copy(to, from)
	if err = errors.Join(err, to.Close(), os.Link(program, lastProgram)); err != nil {
		return fmt.Errorf("keep the agent in memory: %w", err)
	}
	return nil
}

// startAgent starts it with one pipe for its order and one for what came of it.
func startAgent() (order, outcome *os.File, err error) {
	order, orderFar, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer orderFar.Close()
	outcomeFar, outcome, err := os.Pipe()
	if err != nil {
		return nil, nil, errors.Join(err, order.Close())
	}
	defer outcomeFar.Close()
	_, err = syscall.ForkExec(program, []string{BesideName}, &syscall.ProcAttr{
		Dir: "/", Env: os.Environ(), Sys: &syscall.SysProcAttr{Setsid: true},
		Files: []uintptr{0, 1, 2, orderFD: orderFar.Fd(), outcomeFD: outcomeFar.Fd()},
	})
	if err != nil {
		return nil, nil, errors.Join(err, order.Close(), outcome.Close())
	}
	return order, outcome, nil
}

// Leave ends the guest as process 1, when systemd has ended everything; verb is
// what it was asked for (systemd-shutdown(8)). An agent that the host waits for
// does so itself, within a limit.
func Leave(verb string) {
	ctx, cancel := context.WithTimeout(context.Background(), heldFor)
	defer cancel()
	var d net.Dialer
	if conn, err := d.DialContext(ctx, "unix", door); err == nil {
		_ = conn.SetReadDeadline(time.Now().Add(heldFor))
		_, _ = io.Copy(io.Discard, conn)
	}
	if err := filesystems.Clean(); err != nil {
		fmt.Fprintf(os.Stderr, "holdpoint-agent: %v\n", err)
	}
	_ = unix.Reboot(ending(verb))
}

// ending is what the kernel is told. A machine has no use for a halted kernel, and
// another kernel could not boot without the agent.
func ending(verb string) int {
	switch verb {
	case "reboot", "kexec":
		return unix.LINUX_REBOOT_CMD_RESTART
	}
	return unix.LINUX_REBOOT_CMD_POWER_OFF
}
