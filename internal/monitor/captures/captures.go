//go:build linux

// Package captures takes full checkpoints of a monitor's run: it attaches to the
// guest's memory, keeps the book of what changed since the last one, has the
// window opened (package window), and remembers the answer until it is said
// what became of the checkpoint. It neither encodes nor publishes anything.
//
// Memory is attached to at a run's first capture, not at its launch: then it
// takes 1 ms, and counting from then on loses nothing, because all pages that
// differ from the run's memory file can be told at any time. A host that does
// not allow it never keeps a run from beginning.
package captures

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/dirty/book"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/window"
)

// Supervisor is the monitor whose run is captured.
type Supervisor interface {
	// Present is what the record says now, and the run, nil for none, with
	// its config.
	Present() (machine.Run, machine.RunConfig, monitor.Record)
	// Stands is why the guest stands still by nobody's order; nil when it does
	// not.
	Stands() error
	// Turn waits until nobody else changes the run, and keeps others from it.
	Turn(ctx context.Context) (release func(), err error)
	// Record makes a change durable, and then visible.
	Record(change func(*monitor.Record)) error
	// Amend makes a change visible, and durable with the next one that is if
	// it cannot be now.
	Amend(change func(*monitor.Record))
	// SetClock makes the guest's clock that of the host, TuneClock unless it was
	// set in the guest, and StepClock moves it.
	SetClock(ctx context.Context) error
	TuneClock(ctx context.Context) error
	StepClock(ctx context.Context, by time.Duration) error
}

// Config is what Captures works with.
type Config struct {
	Supervisor Supervisor
	// Platform is that of machine.Hypervisor.
	Platform func(ctx context.Context, cfg machine.RunConfig) (machine.Platform, error)
	Log      *slog.Logger
}

// Captures takes the captures of one monitor, one at a time. Its life: New;
// Capture and Settle alternate; Close.
type Captures struct {
	Config
	ctx  context.Context
	stop context.CancelFunc
	// tasks are goroutines that let a guest go or correct its clock.
	tasks sync.WaitGroup
	// one is held during Capture and Settle; what follows is theirs.
	one    chan struct{}
	closed sync.Once
	// runID is the run that memory and book are of.
	runID  string
	memory machine.Memory
	book   *book.Book
	// current is the capture of the record, nil when a predecessor took it.
	current *book.Capture
	// answer is that of current, asked for at begun; after is the correction of
	// the guest's clock that followed, nil for none.
	answer *monitorv1.CaptureResponse
	begun  time.Time
	after  *correction
	// clock is the correction of the guest's clock after the last window.
	clock *correction

	mu       sync.Mutex
	tracking dirty.Strategy
}

// New returns the captures of a monitor.
func New(cfg Config) *Captures {
	c := &Captures{Config: cfg, one: make(chan struct{}, 1)}
	c.ctx, c.stop = context.WithCancel(context.Background())
	return c
}

// Close ends what is under way, lets go of the memory, and waits. The guest is
// let go, unless a capture keeps it paused. It may be called again.
func (c *Captures) Close() {
	c.closed.Do(func() {
		c.stop()
		c.one <- struct{}{} // bounded by the deadline of a window; for good
		c.tasks.Wait()
		c.forget()
	})
}

// Tracking is how changed pages are found; empty before the first capture.
func (c *Captures) Tracking() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.tracking)
}

// begin waits for the captures before; ctx then ends with ours.
func (c *Captures) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	select {
	case c.one <- struct{}{}:
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	case <-c.ctx.Done():
		return nil, nil, errdefs.New(errdefs.WrongState, "this monitor is leaving; try again")
	}
	ctx, cancel := context.WithCancel(ctx)
	unhook := context.AfterFunc(c.ctx, cancel)
	return ctx, func() {
		unhook()
		cancel()
		<-c.one
	}, nil
}

// Capture is that of monitor.Client.
func (c *Captures) Capture(ctx context.Context, req *monitorv1.CaptureRequest) (*monitorv1.CaptureResponse, error) {
	begun := time.Now()
	ctx, end, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	run, cfg, rec := c.Supervisor.Present()
	if rec.Capture != nil && rec.Capture.CheckpointID == req.GetCheckpointId() {
		return c.again(rec.Capture)
	}
	if err := cmp.Or(check(req, run, cfg, rec), c.Supervisor.Stands()); err != nil {
		return nil, err
	}
	platform, err := c.Platform(ctx, cfg)
	if err != nil {
		return nil, err
	}
	described, err := json.Marshal(platform)
	if err != nil {
		return nil, err
	}
	if err := c.track(ctx, run, cfg, rec); err != nil {
		return nil, err
	}
	t := &taking{c: c, req: req, run: run, cfg: cfg, platform: described, begun: begun}
	defer t.leave()
	return t.take(ctx, rec)
}

// again gives the answer that was given before.
func (c *Captures) again(taken *monitor.Capture) (*monitorv1.CaptureResponse, error) {
	if c.answer != nil {
		return c.answer, nil
	}
	answer := &monitorv1.CaptureResponse{}
	if err := protojson.Unmarshal(taken.Answer, answer); err != nil {
		return nil, errdefs.New(errdefs.Storage, "read the answer of capture %s from the record: %w", taken.CheckpointID, err)
	}
	return answer, nil
}

// check refuses what cannot be captured.
func check(req *monitorv1.CaptureRequest, run machine.Run, cfg machine.RunConfig, rec monitor.Record) error {
	id, name := req.GetCheckpointId(), cfg.MachineName
	layer := req.GetLayerId()
	switch {
	case id == "" || layer == "" || !filepath.IsAbs(req.GetLayerPath()) || !filepath.IsAbs(req.GetDir()):
		return errdefs.New(errdefs.Invalid, "capture machine %s: checkpoint, layer and absolute paths of layer and folder are needed", name)
	case rec.Capture != nil:
		return errdefs.New(errdefs.MachineBusy, "capture machine %s: checkpoint %s is not decided yet; wait for it", name, rec.Capture.CheckpointID)
	case run == nil:
		return errdefs.New(errdefs.WrongState, "capture machine %s: its run %s has ended", name, rec.RunID)
	case rec.Phase == monitor.Held || rec.Phase == monitor.Window:
		return errdefs.New(errdefs.WrongState, "capture machine %s: it is stopped by another capture; resume it first", name)
	case rec.Switching:
		return errdefs.New(errdefs.OutcomeUnknown, "capture machine %s: a switch of its disk is not completed; repeat that one first", name)
	case slices.ContainsFunc(rec.Disk, func(l machine.Layer) bool { return l.ID == layer || l.Path == req.GetLayerPath() }):
		return errdefs.New(errdefs.Conflict, "capture machine %s: layer %s belongs to its disk already: a capture to it was interrupted; take another checkpoint", name, layer)
	}
	return nil
}

// track attaches to the run's memory, once.
func (c *Captures) track(ctx context.Context, run machine.Run, cfg machine.RunConfig, rec monitor.Record) error {
	if c.memory != nil && c.runID == cfg.RunID {
		return nil
	}
	c.forget()
	memory, err := run.Memory(ctx)
	if err != nil {
		return err
	}
	parent := rec.Head
	if parent == "" && cfg.Incoming != nil {
		parent = cfg.Incoming.Checkpoint
	}
	c.runID, c.memory, c.book = cfg.RunID, memory, book.New(cfg.RunID, parent, cfg.MemoryBytes)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tracking = memory.Strategy()
	return nil
}

// forget lets go of the memory.
func (c *Captures) forget() {
	if c.memory == nil {
		return
	}
	if err := c.memory.Close(); err != nil {
		c.Log.Warn("let go of the guest's memory", "run", c.runID, "error", err)
	}
	c.memory, c.book = nil, nil
}

// Settle is that of monitor.Client.
func (c *Captures) Settle(ctx context.Context, checkpointID string, published, resume bool) (*monitorv1.SettleCaptureResponse, error) {
	ctx, end, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	_, _, rec := c.Supervisor.Present()
	if rec.Capture != nil && rec.Capture.CheckpointID != checkpointID {
		return &monitorv1.SettleCaptureResponse{}, nil // one that is not known
	}
	after := c.after
	if rec.Capture != nil {
		err = c.decide(rec.Capture, published)
	}
	if resume {
		err = errors.Join(err, c.resume(ctx))
	}
	debug.FreeOSMemory() // what a window needs is not needed until the next
	return c.awaited(after), err
}

// decide ends the capture of the record.
func (c *Captures) decide(taken *monitor.Capture, published bool) error {
	err := c.Supervisor.Record(func(r *monitor.Record) {
		if r.Capture = nil; published && r.RunID == taken.RunID {
			r.Head = taken.CheckpointID
		}
	})
	if err != nil || c.current == nil {
		return err
	}
	if published {
		err = c.current.Publish(taken.CheckpointID)
	}
	c.current.Abandon() // does nothing once it is published
	c.current, c.answer, c.after = nil, nil, nil
	return err
}

// resume lets a run go that a capture has kept paused.
func (c *Captures) resume(ctx context.Context) error {
	release, err := c.Supervisor.Turn(ctx)
	if err != nil {
		return err
	}
	defer release()
	run, _, rec := c.Supervisor.Present()
	if run == nil || rec.Phase != monitor.Held {
		return nil
	}
	c.Supervisor.Amend(func(r *monitor.Record) { r.Phase = monitor.Window })
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resumeTimeout)
	defer cancel()
	if err := run.Resume(ctx); err != nil && !errdefs.Is(err, errdefs.WrongState) {
		c.letGo(run, rec.RunID)
		return errdefs.New(errdefs.OutcomeUnknown, "let a machine go after its capture: %w; it is tried again until it answers", err)
	}
	c.Supervisor.Amend(func(r *monitor.Record) { r.Phase = r.Resumed() })
	c.correct(0)
	return nil
}

// resumeTimeout bounds one attempt to let a guest go, resumePause the time
// between two that fail at once.
const (
	resumeTimeout = 10 * time.Second
	resumePause   = time.Second
)

// letGo lets a guest go whose hypervisor did not answer, when it does again. The
// record says Window meanwhile, so that a successor does the same.
func (c *Captures) letGo(run machine.Run, runID string) {
	c.tasks.Go(func() {
		for {
			ctx, cancel := context.WithTimeout(c.ctx, resumeTimeout)
			err := run.Resume(ctx)
			cancel()
			if err == nil {
				break
			}
			c.Log.Warn("the guest is not let go yet", "run", runID, "error", err)
			select {
			case <-run.Exited():
				return
			case <-c.ctx.Done():
				return
			case <-time.After(resumePause): // it may fail at once
			}
		}
		release, err := c.Supervisor.Turn(c.ctx)
		if err != nil {
			return
		}
		defer func() { release() }()
		_, _, rec := c.Supervisor.Present()
		switch {
		case rec.RunID != runID:
		case rec.Phase == monitor.Window:
			c.Supervisor.Amend(func(r *monitor.Record) { r.Phase = r.Resumed() })
			release()
			release = func() {}
			_ = c.Supervisor.SetClock(c.ctx) // the next window corrects it, too
		case rec.Phase == monitor.UserPaused:
			ctx, cancel := context.WithTimeout(c.ctx, resumeTimeout)
			defer cancel()
			if err := run.Pause(ctx); err != nil {
				c.Log.Warn("the guest runs although a user paused it", "run", runID, "error", err)
			}
		}
	})
}

// Inherit drops a capture of the record that a predecessor did not complete:
// what it left in its folder goes. It says whether the record is to change.
func Inherit(rec monitor.Record) (drop bool, err error) {
	if rec.Capture == nil || len(rec.Capture.Answer) > 0 {
		return false, nil
	}
	return true, window.CleanStaging(rec.Capture.Dir)
}
