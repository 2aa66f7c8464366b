//go:build linux

package stall_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/stall"
)

// double is a supervisor, its run, and the disk of the host.
type double struct {
	machine.Run
	turn   chan struct{}
	exited chan struct{}

	mu      sync.Mutex
	changed chan struct{}
	free    int64
	full    bool // a write fails
	running bool
	still   bool
	resumes int
	caught  int
	told    int
}

func (d *double) change(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *double) AwaitStall(ctx context.Context) error {
	for {
		d.mu.Lock()
		changed, stalled := d.changed, d.full && !d.running
		d.mu.Unlock()
		if stalled && !machine.Ended(d) {
			return nil
		}
		select {
		case <-changed:
		case <-d.exited:
			return errors.New("the run has ended")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (d *double) Resume(context.Context) error {
	d.change(func() { d.resumes, d.running = d.resumes+1, !d.full })
	return nil
}

func (d *double) Running(context.Context) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.running, nil
}

func (d *double) Exited() <-chan struct{} { return d.exited }

func (d *double) Present() (machine.Run, machine.RunConfig, monitor.Record) {
	return d, machine.RunConfig{MachineName: "web", Disk: []machine.Layer{{Path: "/image/root.img"}, {Path: "/layers/top"}}}, monitor.Record{}
}

func (d *double) Turn(ctx context.Context) (func(), error) {
	select {
	case d.turn <- struct{}{}:
		return func() { <-d.turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (d *double) Still() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.still
}

func (d *double) Notify() { d.change(func() { d.told++ }) }

func (d *double) CatchUp(context.Context) { d.change(func() { d.caught++ }) }

func (d *double) space(path string) (int64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if path != "/layers" {
		return 0, errors.New("that is not the folder of the top")
	}
	return d.free, nil
}

// counts are how often it was resumed and its clock corrected.
func (d *double) counts() (resumes, caught int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.resumes, d.caught
}

// watched runs f with a run that is watched and stalled.
func watched(t *testing.T, f func(t *testing.T, d *double, w *stall.Watch)) {
	synctest.Test(t, func(t *testing.T) {
		d := &double{turn: make(chan struct{}, 1), exited: make(chan struct{}), changed: make(chan struct{}), running: true}
		w := stall.New(stall.Config{Supervisor: d, Free: d.space, Log: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(t.Context())
		var kept sync.WaitGroup
		kept.Go(func() { w.Keep(ctx, d) })
		synctest.Wait()
		if err := w.Err(); err != nil {
			t.Error(err)
		}
		d.change(func() { d.running, d.full, d.free = false, true, 3<<20 })
		synctest.Wait()
		f(t, d, w)
		cancel()
		kept.Wait()
		if w.Why() != "" {
			t.Errorf("a run that is not watched stands: %s", w.Why())
		}
	})
}

func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func want(t *testing.T, when string, d *double, w *stall.Watch, stalled bool, resumes, caught int) {
	t.Helper()
	r, c := d.counts()
	if got := w.Why() != ""; got != stalled || r != resumes || c != caught {
		t.Errorf("%s: stalled %t, %d resumes, clock corrected %d times; want %t, %d, %d", when, got, r, c, stalled, resumes, caught)
	}
}

func TestRunGoesOnWhenThereIsRoom(t *testing.T) {
	watched(t, func(t *testing.T, d *double, w *stall.Watch) {
		const line = "machine web stands still because the host could not write its disk (free space in /layers: 3 MiB); free some space, it goes on by itself"
		if err := w.Err(); !errdefs.Is(err, errdefs.WrongState) || err.Error() != line {
			t.Error(err)
		}
		after(21 * time.Second)
		want(t, "without room", d, w, true, 0, 0)
		d.change(func() { d.free = 20 << 20 })
		after(2 * time.Second)
		want(t, "with little room", d, w, true, 0, 0)
		if !strings.Contains(w.Why(), "20 MiB") {
			t.Error(w.Why())
		}
		d.change(func() { d.free, d.full = 64<<20, false })
		after(3 * time.Second)
		want(t, "with room", d, w, false, 1, 1)
		if d.told < 3 {
			t.Errorf("told %d times", d.told)
		}
		d.change(func() { d.running, d.full = false, true })
		synctest.Wait()
		want(t, "a second time", d, w, true, 1, 1)
	})
}

func TestRunIsTriedWithoutRoom(t *testing.T) {
	watched(t, func(t *testing.T, d *double, w *stall.Watch) {
		after(61 * time.Second)
		want(t, "twice in vain", d, w, true, 2, 0)
		d.change(func() { d.full = false })
		after(31 * time.Second)
		want(t, "the third time", d, w, false, 3, 1)
	})
}

func TestRunThatStandsByOrderIsLeftAlone(t *testing.T) {
	watched(t, func(t *testing.T, d *double, w *stall.Watch) {
		d.change(func() { d.still, d.free, d.full = true, 1<<30, false })
		after(time.Minute)
		want(t, "by order", d, w, true, 0, 0)
		d.change(func() { d.still = false })
		after(3 * time.Second)
		want(t, "again without", d, w, false, 1, 1)
	})
}

func TestLookAfterAnothersResume(t *testing.T) {
	watched(t, func(t *testing.T, d *double, w *stall.Watch) {
		w.Look(t.Context())
		want(t, "not resumed", d, w, true, 0, 0)
		d.change(func() { d.full, d.running = false, true })
		began := time.Now()
		w.Look(t.Context())
		if took := time.Since(began); w.Why() != "" || took > time.Second {
			t.Errorf("after %s: %s", took, w.Why())
		}
		w.Look(t.Context()) // nothing stands
	})
}

func TestChangeUnderWayIsWaitedFor(t *testing.T) {
	watched(t, func(t *testing.T, d *double, w *stall.Watch) {
		release, _ := d.Turn(t.Context())
		d.change(func() { d.free, d.full = 1<<30, false })
		after(5 * time.Second)
		want(t, "during a change", d, w, true, 0, 0)
		release()
		after(5 * time.Second)
		want(t, "after it", d, w, false, 1, 1)
	})
}

func TestStalledRunEnds(t *testing.T) {
	watched(t, func(t *testing.T, d *double, w *stall.Watch) {
		close(d.exited)
		synctest.Wait()
		want(t, "ended", d, w, false, 0, 0)
		w.Look(t.Context())
	})
}
