//go:build linux

package agent

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent/filesystems"
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
	// systemGrace is how long the guest's own init may take to end everything:
	// twice what systemd gives a service.
	systemGrace = 3 * time.Minute
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
	if a.cfg.System != nil {
		return a.stopSystem()
	}
	if a.awaitEnd(grace) != nil {
		a.signalAll(syscall.SIGKILL)
		if err := a.awaitEnd(killGrace); err != nil {
			return errdefs.New(errdefs.Deadline, "processes are still there %s after they were killed", killGrace)
		}
	}
	if !a.cfg.Init {
		return nil
	}
	return filesystems.Clean()
}

// stopSystem has the guest's own init end the rest, each service with the time
// that it is given there. An error after that cannot stop the end any more.
func (a *Agent) stopSystem() error {
	ctx, cancel := context.WithTimeout(context.Background(), systemGrace)
	defer cancel()
	err := a.cfg.System.Stop(ctx)
	if err == nil {
		err = filesystems.Clean()
	}
	if err != nil {
		a.cfg.System.Release()
	}
	return err
}

func (a *Agent) awaitEnd(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return a.family.AwaitEmpty(ctx)
}

// signalAll signals every process of the guest but this one; in an ordinary
// process, or beside another init, only its own commands.
func (a *Agent) signalAll(n syscall.Signal) {
	if a.cfg.Init && a.cfg.System == nil {
		_ = syscall.Kill(-1, n) // ESRCH: there is none
		return
	}
	for _, pid := range a.family.PIDs() {
		_ = syscall.Kill(-pid, n) // ESRCH: it has ended
	}
}
