//go:build linux

// Package stall watches for a monitor's run to be stopped by its hypervisor
// itself, because the host had no room for a write to the machine's disk, says
// so, and lets the guest go on as soon as there is room again.
package stall

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// Supervisor is the monitor whose run it is.
type Supervisor interface {
	// Present is what the record says now, and the run with its config.
	Present() (machine.Run, machine.RunConfig, monitor.Record)
	// Turn waits until nobody else changes the run, and keeps others from it.
	Turn(ctx context.Context) (release func(), err error)
	// Still reports whether the guest's CPUs stand still by order.
	Still() bool
	// Notify is called after each change of Why.
	Notify()
	// CatchUp corrects the clock of a guest that stood still.
	CatchUp(ctx context.Context)
}

// How a run is let go on.
const (
	// lookEvery is how often the free space is looked at.
	lookEvery = 2 * time.Second
	// enough is the free space with which it goes on, in bytes.
	enough = 64 << 20
	// tryEvery is how often it is tried with less: the file system may know
	// better what it has room for.
	tryEvery = 30 * time.Second
	// proof is how long a run must not be stopped again to have gone on. QEMU
	// tries the failed write first of all.
	proof = 500 * time.Millisecond
	// tryTimeout bounds what is asked of the hypervisor for one try.
	tryTimeout = 10 * time.Second
)

// Config is what a Watch works with.
type Config struct {
	Supervisor Supervisor
	// Free is durable.FreeBytes.
	Free func(path string) (int64, error)
	Log  *slog.Logger
}

// Watch watches one run after the other. Its life: New; Keep for each run.
type Watch struct {
	Config
	// asked carries what wants to be closed after a look.
	asked chan chan struct{}

	mu  sync.Mutex
	why string
}

// New returns a watch that sees nothing yet.
func New(cfg Config) *Watch { return &Watch{Config: cfg, asked: make(chan chan struct{})} }

// Why is why the run was stopped, one line for people; empty when it was not.
func (w *Watch) Why() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.why
}

// Err refuses what needs a guest that is not stopped so; nil when it is not.
func (w *Watch) Err() error {
	if why := w.Why(); why != "" {
		return errdefs.New(errdefs.WrongState, "%s", why)
	}
	return nil
}

// Look is called when the run may have gone on by another's doing. Why is right
// again when it returns, unless ctx has ended.
func (w *Watch) Look(ctx context.Context) {
	for looked := make(chan struct{}); w.Why() != ""; {
		select {
		case w.asked <- looked:
			<-looked // bounded by tryTimeout
			return
		case <-time.After(proof): // it may have ended meanwhile
		case <-ctx.Done():
			return
		}
	}
}

// Keep watches the run until it or ctx has ended.
func (w *Watch) Keep(ctx context.Context, run machine.Run) {
	defer w.say("")
	for ctx.Err() == nil {
		err := run.AwaitStall(ctx)
		switch {
		case err == nil:
			w.stand(ctx, run)
		case ctx.Err() == nil && !machine.Ended(run):
			w.Log.Warn("whether the hypervisor stops the run is not known", "error", err)
			pause(ctx, lookEvery)
		default:
			return
		}
	}
}

// stand returns when the stopped run has gone on, or ended.
func (w *Watch) stand(ctx context.Context, run machine.Run) {
	w.describe()
	w.Log.Warn("the hypervisor stopped the run", "why", w.Why())
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	tried := time.Now()
	for {
		asked := make(chan struct{})
		select {
		case <-tick.C:
		case asked = <-w.asked:
		case <-run.Exited():
			return
		case <-ctx.Done():
			return
		}
		force := time.Since(tried) >= tryEvery
		if room := w.describe(); room || force {
			tried = time.Now()
			force = true
		}
		on, err := w.try(ctx, run, force)
		if err != nil && ctx.Err() == nil && !machine.Ended(run) {
			w.Log.Warn("a stopped run is not let go on", "error", err)
		}
		if on {
			w.say("")
		}
		close(asked)
		if on {
			w.Log.Info("the run goes on")
			w.Supervisor.CatchUp(ctx)
			return
		}
	}
}

// describe says why the run is stopped, and reports whether there is room again.
func (w *Watch) describe() bool {
	_, cfg, _ := w.Supervisor.Present()
	dir := filepath.Dir(cfg.Disk[len(cfg.Disk)-1].Path)
	free, err := w.Free(dir)
	space := fmt.Sprintf("free space in %s: %d MiB", dir, free>>20)
	if err != nil {
		space = err.Error()
	}
	w.say(fmt.Sprintf("machine %s stands still because the host could not write its disk (%s); free some space, it goes on by itself", cfg.MachineName, space))
	return err == nil && free >= enough
}

func (w *Watch) say(why string) {
	w.mu.Lock()
	changed := w.why != why
	w.why = why
	w.mu.Unlock()
	if changed {
		w.Supervisor.Notify()
	}
}

// try reports whether the run goes on; resume says to have it do so. One that
// stands still by order is left alone.
func (w *Watch) try(ctx context.Context, run machine.Run, resume bool) (on bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	if on, err = w.resume(ctx, run, resume); !on || err != nil {
		return false, err
	}
	ctx, cancel = context.WithTimeout(ctx, proof)
	defer cancel()
	err = run.AwaitStall(ctx)
	if err != nil && ctx.Err() != nil {
		return true, nil
	}
	return false, err
}

func (w *Watch) resume(ctx context.Context, run machine.Run, resume bool) (on bool, err error) {
	release, err := w.Supervisor.Turn(ctx)
	if err != nil {
		return false, err
	}
	defer release()
	if w.Supervisor.Still() {
		return false, nil
	}
	if on, err = run.Running(ctx); on || err != nil || !resume {
		return on, err
	}
	return true, run.Resume(ctx)
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
