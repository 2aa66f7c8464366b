//go:build linux

// Package slumber suspends machines that nobody uses, where their spec asks
// for it, and wakes them for whoever comes. It decides when; how a machine is
// suspended and resumed is said elsewhere.
package slumber

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// maxIdleCPU is the part of one CPU that the process of an idle machine may
// use: the guest's own timers take less than 1 % under TCG.
const maxIdleCPU = 0.02

// askTimeout bounds a question to a monitor or guest.
const askTimeout = 10 * time.Second

// Config is what a Watch works with.
type Config struct {
	Catalog *catalog.Catalog
	Gates   *hold.Gates
	Keeper  *keeper.Keeper
	// Suspend suspends a machine that is still idle, and Resume resumes one that
	// is suspended, each as an operation; they return when that has ended.
	Suspend, Resume func(ctx context.Context, machineID string) error
	Log             *slog.Logger
}

// Watch is the watch over all machines. Its life: New; Refresh whenever
// machines may be others; Close.
type Watch struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	watched map[string]*vigil
	waking  map[string]*wake
}

// vigil is the watch over one run of one machine.
type vigil struct {
	run    *fleet.Run
	after  time.Duration
	cancel context.CancelFunc
}

// wake is a resume that any number of callers wait for.
type wake struct {
	done chan struct{}
	err  error
}

// New returns a Watch over nothing yet.
func New(cfg Config) *Watch {
	ctx, cancel := context.WithCancel(context.Background())
	return &Watch{cfg: cfg, ctx: ctx, cancel: cancel, watched: map[string]*vigil{}, waking: map[string]*wake{}}
}

// Close ends the watch and waits for what it runs.
func (w *Watch) Close() {
	w.cancel()
	w.wg.Wait()
}

// Refresh looks which machines are to be watched now.
func (w *Watch) Refresh(ctx context.Context) error {
	// The look and what follows of it are one step: of two Refreshes at once
	// the later one must not go by the older list, and let go of a machine that
	// was resumed meanwhile.
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ctx.Err() != nil {
		return nil
	}
	machines, err := w.cfg.Catalog.ListMachines(ctx)
	if err != nil {
		return err
	}
	left := w.watched
	w.watched = map[string]*vigil{}
	for _, m := range machines {
		run := w.cfg.Keeper.Run(m.ID)
		after := time.Duration(m.Spec.SuspendAfterMillis) * time.Millisecond
		if after <= 0 || keeper.State(m, run) != machine.Running {
			continue
		}
		v := left[m.ID]
		if v == nil || v.run != run || v.after != after {
			v = w.watch(m, run, after)
		} else {
			delete(left, m.ID)
		}
		w.watched[m.ID] = v
	}
	for _, v := range left {
		v.cancel()
	}
	return nil
}

func (w *Watch) watch(m catalog.Machine, run *fleet.Run, after time.Duration) *vigil {
	ctx, cancel := context.WithCancel(w.ctx)
	v := &vigil{run: run, after: after, cancel: cancel}
	w.wg.Go(func() {
		defer cancel()
		for ctx.Err() == nil && !run.Ended() {
			if !w.idle(ctx, m.ID, v) {
				continue
			}
			w.cfg.Log.Info("suspend an idle machine", "machine", m.Name, "idle", after)
			// Its own operation ends this watch by Refresh: it must not wait for it.
			err := w.cfg.Suspend(context.WithoutCancel(ctx), m.ID)
			if err == nil {
				return
			}
			w.cfg.Log.Warn("suspend an idle machine", "machine", m.Name, "error", err)
		}
	})
	return v
}

// idle waits until the machine may have been idle for long enough, and reports
// whether it was: no door used, little CPU, no command at work. It takes at
// least that long, unless a door is used meanwhile.
func (w *Watch) idle(ctx context.Context, machineID string, v *vigil) bool {
	active, changed := w.cfg.Gates.Activity(machineID)
	if active > 0 {
		select {
		case <-changed:
		case <-ctx.Done():
		}
		return false
	}
	before, known := cpuOf(ctx, v.run)
	begun := time.Now()
	timer := time.NewTimer(v.after)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-changed:
		return false
	case <-ctx.Done():
		return false
	}
	after, stillKnown := cpuOf(ctx, v.run)
	if !known || !stillKnown || float64(after-before) > maxIdleCPU*float64(time.Since(begun)) {
		return false
	}
	return quiet(ctx, v.run)
}

// cpuOf is the CPU time that the run's process has used.
func cpuOf(ctx context.Context, run *fleet.Run) (used time.Duration, known bool) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	status, err := run.StatusNow(ctx)
	return time.Duration(status.GetCpuNano()), err == nil
}

// quiet reports whether no command of ours runs in the guest.
func quiet(ctx context.Context, run *fleet.Run) bool {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	list, err := run.Agent().ListCommands(ctx, connect.NewRequest(&agentv1.ListCommandsRequest{}))
	if err != nil {
		return false
	}
	for _, c := range list.Msg.GetCommands() {
		if c.GetRunning() {
			return false
		}
	}
	return true
}

// Wakes reports whether a door into the machine resumes it.
func Wakes(m catalog.Machine) bool {
	return m.State == machine.Suspended && m.Spec.SuspendAfterMillis > 0
}

// Wake resumes a suspended machine and returns when it runs. Any number of
// callers share one resume.
func (w *Watch) Wake(ctx context.Context, machineID string) error {
	w.mu.Lock()
	shared := w.waking[machineID]
	if shared == nil {
		if w.ctx.Err() != nil {
			w.mu.Unlock()
			return errdefs.New(errdefs.WrongState, "resume machine %s: the daemon is stopping", machineID)
		}
		shared = &wake{done: make(chan struct{})}
		w.waking[machineID] = shared
		w.wg.Go(func() {
			shared.err = wire.Decode(w.cfg.Resume(w.ctx, machineID))
			w.mu.Lock()
			delete(w.waking, machineID)
			w.mu.Unlock()
			close(shared.done)
		})
	}
	w.mu.Unlock()
	select {
	case <-shared.done:
		return shared.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
