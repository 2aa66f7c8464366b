//go:build linux

// Package revive starts machines again whose spec asks for it: after the host or
// the guest has ended them, never after a person has. It decides when, and how
// often; how a machine is started is said elsewhere.
package revive

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

const (
	// together is how many machines are started at once: a boot takes a whole CPU
	// for seconds.
	together = 2
	// firstWait is how long the second start in a row is put off; each one after
	// that waits twice as long, up to lastWait.
	firstWait = time.Second
	lastWait  = 5 * time.Minute
	// steady is how long a machine has to run so that its next end is the first one.
	steady = time.Minute
)

// Config is what a Watch works with.
type Config struct {
	Catalog *catalog.Catalog
	Keeper  *keeper.Keeper
	// Start starts a machine that Wanted still says yes of, as an operation that
	// ctx cancels; it returns when that has ended.
	Start func(ctx context.Context, machineID string) error
	Log   *slog.Logger
}

// Watch is the watch over all machines. Its life: New; Look whenever machines
// may be others; Stop, after which nothing is begun; Close.
type Watch struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	slots  *semaphore.Weighted
	wg     sync.WaitGroup

	mu     sync.Mutex
	fallen map[string]*fall
}

// fall is what is known of a machine that was to be started again.
type fall struct {
	// starts in a row, failed ones included.
	starts int
	// began is when it was started last; zero when that failed.
	began time.Time
	// busy: somebody is about to start it, until stop was called and ended is closed.
	busy    bool
	stop    context.CancelFunc
	ended   chan struct{}
	trouble string
}

// New returns a Watch over nothing yet.
func New(cfg Config) *Watch {
	ctx, cancel := context.WithCancel(context.Background())
	return &Watch{cfg: cfg, ctx: ctx, cancel: cancel, slots: semaphore.NewWeighted(together), fallen: map[string]*fall{}}
}

// Stop makes the Watch begin nothing more.
func (w *Watch) Stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cancel()
}

// Close stops and waits for what the Watch runs.
func (w *Watch) Close() {
	w.Stop()
	w.wg.Wait()
}

// Trouble says why a machine could not be started again; "" for nothing of that.
func (w *Watch) Trouble(machineID string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f := w.fallen[machineID]; f != nil {
		return f.trouble
	}
	return ""
}

// Look looks which machines are to be started again now, and has that begun. A
// machine that runs is at rest no longer, whoever started it.
func (w *Watch) Look(ctx context.Context) error {
	machines, err := w.cfg.Catalog.ListMachines(ctx)
	if err != nil {
		return err
	}
	resting, err := w.cfg.Catalog.AtRest(ctx)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ctx.Err() != nil {
		return nil
	}
	known := map[string]*fall{}
	for _, m := range machines {
		run := w.cfg.Keeper.Run(m.ID)
		state := keeper.State(m, run)
		f := w.fallen[m.ID]
		if resting[m.ID] && state == machine.Running && m.HeldBy == "" {
			if err := w.cfg.Catalog.EndRest(ctx, m.ID); err != nil {
				return err
			}
			f = nil // a person has started it: what was before does not count
		}
		if Applies(m) && state == machine.Stopped && !resting[m.ID] {
			if f == nil {
				f = &fall{}
			}
			if m.HeldBy == "" && !f.busy {
				w.begin(m, f)
			}
		}
		if f != nil && Applies(m) {
			known[m.ID] = f
		}
	}
	w.fallen = known
	return nil
}

// Applies reports whether the machine is one to be started again.
func Applies(m catalog.Machine) bool {
	return m.Spec.Restart == machine.RestartAlways && !m.RemoveOnStop
}

// Wanted reports whether the machine is to be started again now.
func Wanted(ctx context.Context, c *catalog.Catalog, k *keeper.Keeper, machineID string) (bool, error) {
	m, err := c.GetMachine(ctx, machineID)
	if err != nil {
		return false, err
	}
	resting, err := c.AtRest(ctx)
	return err == nil && Applies(m) && !resting[m.ID] && keeper.State(m, k.Run(m.ID)) == machine.Stopped, err
}

// begin has a machine started after the pause that is due. The caller has w.mu.
func (w *Watch) begin(m catalog.Machine, f *fall) {
	if !f.began.IsZero() && time.Since(f.began) > steady {
		f.starts = 0
	}
	wait := pause(f.starts)
	if wait > 0 && !f.began.IsZero() {
		f.trouble = fmt.Sprintf("it ended (%s) soon after it was started by itself, %d times in a row; it is started again within %s", m.Exit, f.starts, wait)
	}
	f.starts++
	f.busy, f.began = true, time.Time{}
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan struct{})
	f.stop, f.ended = cancel, ended
	w.wg.Go(func() {
		defer close(ended)
		err := w.start(ctx, m, wait)
		stopped := ctx.Err() != nil
		cancel()
		w.mu.Lock()
		f.busy, f.trouble = false, ""
		switch {
		case err == nil:
			f.began = time.Now()
		case !stopped && !passes(err):
			f.trouble = fmt.Sprintf("it could not be started by itself, and is tried again in %s: %v", pause(f.starts), err)
			w.cfg.Log.Warn("start a machine again", "machine", m.Name, "again_in", pause(f.starts), "error", err)
		}
		w.mu.Unlock()
		if err != nil && w.ctx.Err() == nil {
			if err := w.Look(w.ctx); err != nil {
				w.cfg.Log.Warn("look for machines to start", "error", err)
			}
		}
	})
}

// passes reports whether an error is no trouble of the machine: somebody else
// has it, or has changed it meanwhile.
func passes(err error) bool {
	return errdefs.Is(err, errdefs.MachineBusy) || errdefs.Is(err, errdefs.WrongState) || errdefs.Is(err, errdefs.NotFound)
}

// start waits and starts the machine, if that is still wanted.
func (w *Watch) start(ctx context.Context, m catalog.Machine, wait time.Duration) error {
	select {
	case <-time.After(wait):
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := w.slots.Acquire(ctx, 1); err != nil {
		return err
	}
	defer w.slots.Release(1)
	wanted, err := Wanted(ctx, w.cfg.Catalog, w.cfg.Keeper, m.ID)
	if err != nil || !wanted {
		return err
	}
	w.cfg.Log.Info("start a machine again", "machine", m.Name, "exit", m.Exit)
	return w.cfg.Start(ctx, m.ID)
}

// Rest puts a machine to rest, on a person's word, that has ended and would be
// started again, or is just being started: that is taken back first. It reports
// whether the machine was one of these.
func (w *Watch) Rest(ctx context.Context, m catalog.Machine) (bool, error) {
	resting, err := w.cfg.Catalog.AtRest(ctx)
	if err != nil || resting[m.ID] || !Applies(m) {
		return false, err
	}
	w.mu.Lock()
	var stop context.CancelFunc
	var ended chan struct{}
	if f := w.fallen[m.ID]; f != nil && f.busy {
		stop, ended = f.stop, f.ended
	}
	w.mu.Unlock()
	if stop == nil && keeper.State(m, w.cfg.Keeper.Run(m.ID)) != machine.Stopped {
		return false, nil
	}
	if err := w.cfg.Catalog.PutToRest(ctx, m.ID); err != nil || stop == nil {
		return true, err
	}
	stop()
	select {
	case <-ended:
		return true, nil
	case <-ctx.Done():
		return true, context.Cause(ctx)
	}
}

// pause is how long the start after so many in a row is put off.
func pause(starts int) time.Duration {
	if starts == 0 {
		return 0
	}
	if starts > 10 {
		return lastWait
	}
	return min(firstWait<<(starts-1), lastWait)
}
