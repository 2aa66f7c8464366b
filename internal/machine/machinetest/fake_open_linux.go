package machinetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// resumeLimit is how long a run whose window failed may take to go on before
// that is unknown.
const resumeLimit = 500 * time.Millisecond

// Window is one of the fake: its steps are those of the real one.
func (r *fakeRun) Window(ctx context.Context, w machine.Window) (machine.WindowTimes, error) {
	var t machine.WindowTimes
	if err := ctx.Err(); err != nil {
		return t, fmt.Errorf("open window of run %s: %w", r.cfg.RunID, context.Cause(ctx))
	}
	if running, err := r.Running(ctx); err != nil {
		return t, err
	} else if running == w.WasPaused {
		return t, errdefs.New(errdefs.WrongState, "open window of run %s: running is %v, paused was said to be %v", r.cfg.RunID, running, w.WasPaused)
	}
	begun := time.Now()
	err := r.steps(ctx, w, &t)
	if !w.WasPaused && (err != nil || !w.StayPaused) {
		err = r.goOn(ctx, err, &t)
	}
	t.Downtime = time.Since(begun)
	if err != nil {
		return machine.WindowTimes{}, fmt.Errorf("window: %w", err)
	}
	return t, nil
}

// steps are those in which the vCPUs stand still.
func (r *fakeRun) steps(ctx context.Context, w machine.Window, t *machine.WindowTimes) error {
	if err := timed(&t.Stop, func() error { return r.step(ctx, request{Op: "pause"}) }); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pages := make(chan error, 1)
	go func() {
		err := timed(&t.Pages, func() error { return r.pages(ctx, w) })
		if err != nil {
			cancel()
		}
		pages <- err
	}()
	err := r.devices(ctx, w, t)
	if err != nil {
		cancel()
	}
	if perr := <-pages; perr != nil && (err == nil || errors.Is(err, context.Canceled)) {
		err = perr
	}
	return err
}

// devices is what runs beside the pages.
func (r *fakeRun) devices(ctx context.Context, w machine.Window, t *machine.WindowTimes) error {
	err := timed(&t.Devices, func() error {
		a, err := r.call(ctx, request{Op: "devices", Window: true})
		if err == nil {
			_, err = w.State.Write(a.Data)
		}
		return err
	})
	if err != nil || w.Top == nil {
		return err
	}
	return timed(&t.Switch, func() error { return r.step(ctx, request{Op: "switch", Layer: *w.Top}) })
}

// pages has the caller read the last pages.
func (r *fakeRun) pages(ctx context.Context, w machine.Window) error {
	if err := stepFails(r.spec, "pages"); err != nil {
		return err
	}
	if text, ok := readFault(r.spec, "window-waits"); ok && text == "pages" {
		awaitGone(faultPath(r.spec, "window-waits"))
	}
	if w.Pages == nil {
		return nil
	}
	return w.Pages(ctx)
}

func (r *fakeRun) step(ctx context.Context, req request) error {
	req.Window = true
	_, err := r.call(ctx, req)
	return err
}

// goOn lets the vCPUs go at the end of a window, or after its error. It is
// asked for even when the machine hangs, which then goes on when it can.
func (r *fakeRun) goOn(ctx context.Context, failed error, t *machine.WindowTimes) error {
	limit := resumeLimit
	if deadline, ok := ctx.Deadline(); ok {
		limit = max(limit, time.Until(deadline))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	err := timed(&t.Resume, func() error { return r.step(ctx, request{Op: "resume"}) })
	switch {
	case err == nil:
		return failed
	case errdefs.Is(err, errdefs.WrongState):
		return err // it has ended
	case errdefs.Is(err, errdefs.Deadline):
		return errdefs.New(errdefs.OutcomeUnknown, "run %s does not say whether it goes on: %w", r.cfg.RunID, cmp.Or(failed, err))
	}
	// What failed is the step; the machine itself can go on.
	if again := r.Resume(ctx); again != nil {
		return errdefs.New(errdefs.OutcomeUnknown, "run %s does not go on: %w", r.cfg.RunID, again)
	}
	return cmp.Or(failed, err)
}

func timed(d *time.Duration, f func() error) error {
	begun := time.Now()
	err := f()
	*d = time.Since(begun)
	return err
}
