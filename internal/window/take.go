//go:build linux

package window

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/dirty/book"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// DefaultDeadline is how long a window may be open.
const DefaultDeadline = 2 * time.Second

// undoTimeout bounds what lets the guest go after a failure.
const undoTimeout = 10 * time.Second

// Run is the machine.Run, as far as windows need it.
type Run interface {
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	Window(ctx context.Context, w machine.Window) (machine.WindowTimes, error)
}

// Config is what a window is opened on, and how.
type Config struct {
	Run         Run
	Memory      machine.Memory
	MemoryBytes int64
	// Book counts the pages of this run that changed.
	Book *book.Book
	// Rebase counts anew: all pages that differ from the run's memory file. A
	// book that does not know its set is always counted anew.
	Rebase bool
	// Base, not nil, are pages of the run's memory file that are wanted too.
	Base *dirty.Set
	// Whole takes all pages for changed; those that are neither counted nor of
	// Base are zero, and stay holes.
	Whole bool
	// Dir is the staging folder. Files of ours in it are replaced.
	Dir string
	// Top is the new top of the disk; nil leaves the disk as it is.
	Top *machine.Layer
	// SyncDisk syncs the file of the disk's present top; nil is nothing to sync.
	SyncDisk func(ctx context.Context) error
	// Enter is called once, before the guest is stopped for the first time,
	// and says whether it stands still already. On error nothing is done.
	Enter func(ctx context.Context) (wasPaused bool, err error)
	// Closed is called once the window has closed without error, before the
	// files are complete; nil is nobody to call.
	Closed func(machine.WindowTimes)
	// StayPaused leaves the guest stopped after a window without error.
	StayPaused bool
	// Deadline is how long the window may be open; 0 is DefaultDeadline.
	Deadline time.Duration
	// Free gives the free bytes where a folder is; nil asks the file system.
	Free func(dir string) (int64, error)
}

// Result is what was taken.
type Result struct {
	// Capture is sealed; the caller ends it by Publish or Abandon.
	Capture *book.Capture
	// Pages are those in the file pages.
	Pages int64
	// Precopy is the time of looking and copying while the guest ran, in
	// Rounds; SyncDisk that of both syncs.
	Precopy, SyncDisk time.Duration
	Rounds            int
	Times             machine.WindowTimes
	// PrecopiedBytes and WindowBytes were copied before and in the window.
	PrecopiedBytes, WindowBytes int64
}

// taking is one Take under way.
type taking struct {
	Config
	out *staging
	// todo are the pages wanted that are not copied as they are now.
	todo *dirty.Set
	// entered says that Enter was called; wasPaused is what it said.
	entered, wasPaused bool
	capture            *book.Capture
	result             Result

	// mu is held while the pages of the window are copied.
	mu sync.Mutex
	// sealed is nil before, and over says that it is too late for it.
	sealed *dirty.Set
	over   bool
}

// Take opens a window. On error the guest runs as before (OUTCOME_UNKNOWN: the
// hypervisor did not say so), the book counts as if nothing had been, and
// nothing of ours is left in the folder; the disk's top is the old or the new
// one if Run.Window was called. ctx ends it until the window opens; from then
// on the deadline alone does.
func Take(ctx context.Context, cfg Config) (Result, error) {
	if cfg.Deadline == 0 {
		cfg.Deadline = DefaultDeadline
	}
	var undo undo.Stack
	defer undo.Run()
	capture, err := cfg.Book.Begin(cfg.Book.Epoch())
	if err != nil {
		return Result{}, err
	}
	undo.Add(capture.Abandon)
	out, err := stage(cfg.Dir, cfg.MemoryBytes, cfg.Memory)
	if err != nil {
		return Result{}, err
	}
	undo.Add(out.discard)
	t := &taking{Config: cfg, out: out, capture: capture, todo: dirty.NewSet(cfg.MemoryBytes)}
	if err := t.prepare(ctx); err != nil {
		return Result{}, err
	}
	if err := t.open(ctx); err != nil {
		return Result{}, err
	}
	if t.StayPaused && !t.wasPaused {
		undo.Add(func() { err = t.letGo(ctx, err) })
	}
	if t.Closed != nil {
		t.Closed(t.result.Times)
	}
	if err = t.finish(); err != nil {
		undo.Run() // now, as it may add to the error
		return Result{}, err
	}
	undo.Release()
	return t.result, nil
}

// enter calls Enter, once.
func (t *taking) enter(ctx context.Context) (err error) {
	if t.entered {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("open window: %w", err)
	}
	t.entered = true
	t.wasPaused, err = t.Enter(ctx)
	return err
}

// open is the window itself.
func (t *taking) open(ctx context.Context) error {
	if err := t.enter(ctx); err != nil {
		return err
	}
	if err := t.out.reserve(t.todo.Bytes()); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.Deadline)
	defer cancel()
	times, err := t.Run.Window(limited, machine.Window{
		State: t.out.devices, Top: t.Top, Pages: t.pages, StayPaused: t.StayPaused, WasPaused: t.wasPaused,
	})
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	if err == nil && t.sealed == nil {
		err = errdefs.New(errdefs.Internal, "open window: the last pages were not asked for")
		if t.StayPaused && !t.wasPaused {
			err = t.letGo(ctx, err)
		}
	}
	t.result.Times = times
	return err
}

// pages takes the last pages while the guest stands still.
func (t *taking) pages(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over || t.sealed != nil {
		return errdefs.New(errdefs.WrongState, "copy the last pages: the window is over")
	}
	if err := t.scan(); err != nil {
		return err
	}
	before := t.out.copied
	if err := t.out.copyStill(ctx, t.todo); err != nil {
		return err
	}
	t.result.WindowBytes = t.out.copied - before
	sealed, err := t.capture.Seal()
	t.sealed = sealed
	return err
}

// letGo resumes a guest that was stopped, because of cause.
func (t *taking) letGo(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err := t.Run.Resume(ctx)
	if err == nil || errdefs.Is(err, errdefs.WrongState) { // WRONG_STATE: it has ended
		return cause
	}
	if cause == nil {
		return errdefs.New(errdefs.OutcomeUnknown, "let the guest go after a pause: %w", err)
	}
	return errdefs.New(errdefs.OutcomeUnknown, "%w, and letting the guest go: %w", cause, err)
}

// finish completes the files.
func (t *taking) finish() error {
	pages := t.sealed
	if t.Whole {
		pages = dirty.NewSet(t.MemoryBytes)
		pages.Add(0, t.MemoryBytes/dirty.PageSize)
	}
	if err := t.out.complete(pages); err != nil {
		return err
	}
	t.result.Capture, t.result.Pages = t.capture, pages.Len()
	return nil
}
