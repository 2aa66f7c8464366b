//go:build linux

package agent

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

const (
	// killGrace is how long killed processes may take to be gone; one that
	// waits for a hung disk may take longer.
	killGrace = 10 * time.Second
	// answerGrace is how long the host may take to say that it has the answer
	// to Shutdown.
	answerGrace = 2 * time.Second
)

// Shutdown stops all processes, makes the file systems clean, and has the
// machine powered off once the host has the answer. It does not stop when the
// caller goes away: what was begun is finished. After an error the guest goes
// on, without the processes that were stopped.
func (a *Agent) Shutdown(_ context.Context, req *connect.Request[agentv1.ShutdownRequest]) (*connect.Response[agentv1.ShutdownResponse], error) {
	a.mu.Lock()
	if a.stopping {
		a.mu.Unlock()
		return nil, wire.Encode(errdefs.New(errdefs.WrongState, "the machine is shutting down already"))
	}
	a.stopping = true
	a.mu.Unlock()
	err := a.stop(time.Duration(req.Msg.GetGraceMillis()) * time.Millisecond)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		a.stopping = false
		return nil, wire.Encode(fmt.Errorf("shut down: %w; the machine goes on", err))
	}
	a.answered = true
	time.AfterFunc(answerGrace, a.heard)
	return connect.NewResponse(&agentv1.ShutdownResponse{}), nil
}

func (a *Agent) stop(grace time.Duration) error {
	a.cfg.Log.Info("shutting down", "grace", grace)
	a.signalAll(syscall.SIGTERM)
	for _, c := range a.commands.List() {
		if c.TTY {
			_ = c.Signal(syscall.SIGHUP) // shells at a terminal ignore SIGTERM
		}
	}
	a.signalAll(syscall.SIGCONT)
	if a.awaitEnd(grace) != nil {
		a.signalAll(syscall.SIGKILL)
		if err := a.awaitEnd(killGrace); err != nil {
			return errdefs.New(errdefs.Deadline, "processes are still there %s after they were killed", killGrace)
		}
	}
	if !a.cfg.Init {
		return nil
	}
	return cleanFileSystems()
}

func (a *Agent) awaitEnd(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return a.family.AwaitEmpty(ctx)
}

// signalAll signals every process of the guest but this one; in an ordinary
// process, only its own commands.
func (a *Agent) signalAll(n syscall.Signal) {
	if a.cfg.Init {
		_ = syscall.Kill(-1, n) // ESRCH: there is none
		return
	}
	for _, pid := range a.family.PIDs() {
		_ = syscall.Kill(-pid, n) // ESRCH: it has ended
	}
}

// cleanFileSystems unmounts what can be and makes the rest read-only, the last
// mounted first. Only file systems on devices matter, the others are memory.
func cleanFileSystems() error {
	swapOff()
	unix.Sync()
	mounts, err := readMounts()
	if err != nil {
		return err
	}
	var readOnly []string
	for _, m := range slices.Backward(mounts) {
		if m.point == "/" || !m.disk {
			continue
		}
		if unix.Unmount(m.point, 0) == nil {
			continue
		}
		if err := remount(m.point, true); err != nil {
			undoReadOnly(readOnly)
			return errdefs.New(errdefs.Storage, "make %s read-only: %w", m.point, err)
		}
		readOnly = append(readOnly, m.point)
	}
	if err := remount("/", true); err != nil {
		undoReadOnly(readOnly)
		return errdefs.New(errdefs.Storage, "make / read-only: %w", err)
	}
	unix.Sync()
	return nil
}

func undoReadOnly(points []string) {
	for _, p := range points {
		_ = remount(p, false) // as well as can be: it is an error already
	}
}

func remount(point string, readOnly bool) error {
	flags := uintptr(unix.MS_REMOUNT)
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	return unix.Mount("", point, "", flags, "")
}

type mount struct {
	point string
	// disk is whether what is written to it ends in a block device.
	disk bool
}

// readMounts reads /proc/self/mountinfo, see proc(5), in the order of mounting.
func readMounts() ([]mount, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	var out []mount
	for line := range strings.Lines(string(b)) {
		before, after, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 6 || len(g) < 2 {
			continue
		}
		out = append(out, mount{
			point: unescape(f[4]),
			// A stacked file system, overlay or FUSE, holds files open below.
			disk: strings.HasPrefix(g[1], "/dev/") || g[0] == "overlay" || strings.HasPrefix(g[0], "fuse"),
		})
	}
	return out, nil
}

// unescape takes back the octal escapes of blanks in mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// swapOff lets go of swap files, which lie on the file systems.
func swapOff() {
	b, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return // a kernel without swap
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 && strings.HasPrefix(f[0], "/") {
			if p, err := unix.BytePtrFromString(unescape(f[0])); err == nil {
				_, _, _ = unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(p)), 0, 0) // if it stays, the remount says so
			}
		}
	}
}
