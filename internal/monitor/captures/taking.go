//go:build linux

package captures

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/window"
)

// taking is one capture under way.
type taking struct {
	c        *Captures
	req      *monitorv1.CaptureRequest
	run      machine.Run
	cfg      machine.RunConfig
	platform []byte
	begun    time.Time
	// release gives the turn back; nil while it is not ours.
	release func()
	// was is the record before the window.
	was monitor.Record
}

// leave gives the turn back.
func (t *taking) leave() {
	if t.release != nil {
		t.release()
		t.release = nil
	}
}

func (t *taking) top() machine.Layer {
	return machine.Layer{ID: t.req.GetLayerId(), Path: t.req.GetLayerPath(), Format: "qcow2"}
}

// take opens the window and makes its outcome known.
func (t *taking) take(ctx context.Context, rec monitor.Record) (*monitorv1.CaptureResponse, error) {
	top, old := t.top(), rec.Disk[len(rec.Disk)-1].Path
	cfg := window.Config{
		Run: t.run, Memory: t.c.memory, MemoryBytes: t.cfg.MemoryBytes, Book: t.c.book,
		Dir: t.req.GetDir(), Top: &top, StayPaused: t.req.GetStayPaused(),
		Deadline: time.Duration(t.req.GetDeadlineMillis()) * time.Millisecond,
		SyncDisk: func(context.Context) error { return syncFile(old) },
		Enter:    t.enter, Closed: t.closed,
	}
	if err := t.since(&cfg, rec); err != nil {
		return nil, err
	}
	result, err := window.Take(ctx, cfg)
	if err != nil {
		t.undone(err)
		return nil, err
	}
	return t.done(result)
}

// since decides from when on changed pages are counted: never fewer than
// those changed since the parent.
func (t *taking) since(cfg *window.Config, rec monitor.Record) error {
	parent, incoming := t.req.GetParentId(), t.cfg.Incoming
	switch {
	case parent == "" && incoming == nil:
		cfg.Rebase = t.c.book.Epoch().Parent != ""
		return nil
	case parent != "" && t.c.book.Known() && t.c.book.Epoch().Parent == parent:
		return nil
	case parent != "" && (parent == rec.Head || incoming != nil && parent == incoming.Checkpoint):
		cfg.Rebase = true // all that differs from what the run began with
		return nil
	}
	// The parent, if there is one, says nothing about what this run began with.
	cfg.Rebase, cfg.Whole = true, parent != ""
	if incoming == nil {
		return nil
	}
	base, err := dataPages(incoming.MemoryFile, t.cfg.MemoryBytes)
	cfg.Base = base
	return err
}

// enter records that the guest is about to be stopped: a successor lets it go.
func (t *taking) enter(ctx context.Context) (wasPaused bool, err error) {
	release, err := t.c.Supervisor.Turn(ctx)
	if err != nil {
		return false, err
	}
	t.release = release
	t.c.settled()
	run, cfg, rec := t.c.Supervisor.Present()
	if run == nil || cfg.RunID != t.cfg.RunID {
		t.leave()
		return false, errdefs.New(errdefs.WrongState, "capture machine %s: its run %s has ended", t.cfg.MachineName, t.cfg.RunID)
	}
	if err := t.c.Supervisor.Stands(); err != nil {
		t.leave()
		return false, err
	}
	t.was = rec.Clone()
	err = t.c.Supervisor.Record(func(r *monitor.Record) {
		if r.Phase != monitor.UserPaused {
			r.Phase = monitor.Window
		}
		r.Disk, r.Switching = append(r.Disk, t.top()), true
		r.Capture = &monitor.Capture{CheckpointID: t.req.GetCheckpointId(), RunID: t.cfg.RunID, Dir: t.req.GetDir()}
	})
	if err != nil {
		t.leave()
	}
	return t.was.Phase == monitor.UserPaused, err
}

// closed corrects the clock of a guest that was let go, while the files are
// completed.
func (t *taking) closed(times machine.WindowTimes) {
	if t.runsOn() {
		t.c.correct(times.Downtime)
	}
}

// runsOn reports whether the guest runs after the window.
func (t *taking) runsOn() bool {
	return !t.req.GetStayPaused() && t.was.Phase != monitor.UserPaused
}

// undone takes back what was recorded of a window that failed. The new top
// stays in the chain, unless nothing was done: it is the top, or empty.
func (t *taking) undone(cause error) {
	if t.release == nil {
		return // it was not entered
	}
	unknown := errdefs.Is(cause, errdefs.OutcomeUnknown) && t.was.Phase != monitor.UserPaused
	t.c.Supervisor.Amend(func(r *monitor.Record) {
		r.Capture, r.Switching = nil, false
		if errdefs.Is(cause, errdefs.Unsupported) {
			r.Disk = t.was.Disk
		}
		if !unknown && t.was.Phase != monitor.UserPaused {
			r.Phase = r.Resumed()
		}
	})
	if unknown {
		t.c.letGo(t.run, t.cfg.RunID)
	}
}

// done records and gives the answer.
func (t *taking) done(r window.Result) (*monitorv1.CaptureResponse, error) {
	_, _, rec := t.c.Supervisor.Present()
	answer := &monitorv1.CaptureResponse{
		ChangedPages: r.Pages, Tracking: string(t.c.memory.Strategy()), Platform: t.platform,
		Phases: phases(r), Disk: monitor.LayerIDs(rec.Disk),
	}
	recorded, err := protojson.Marshal(answer)
	if err == nil {
		err = t.c.Supervisor.Record(func(rec *monitor.Record) {
			switch {
			case t.was.Phase == monitor.UserPaused:
			case t.req.GetStayPaused():
				rec.Phase = monitor.Held
			default:
				rec.Phase = rec.Resumed()
			}
			rec.Switching, rec.Capture.Answer = false, recorded
		})
	}
	if err != nil {
		return nil, t.unrecorded(r, err)
	}
	t.leave()
	t.c.current, t.c.answer, t.c.begun, t.c.after = r.Capture, answer, t.begun, nil
	if t.runsOn() {
		t.c.after = t.c.clock
	}
	return answer, nil
}

// unrecorded takes back a capture whose answer could not be recorded.
func (t *taking) unrecorded(r window.Result, cause error) error {
	r.Capture.Abandon()
	cause = errors.Join(cause, window.CleanStaging(t.req.GetDir()))
	if t.req.GetStayPaused() && t.was.Phase != monitor.UserPaused {
		ctx, cancel := context.WithTimeout(context.Background(), resumeTimeout)
		defer cancel()
		if err := t.run.Resume(ctx); err != nil && !errdefs.Is(err, errdefs.WrongState) {
			cause = errdefs.New(errdefs.OutcomeUnknown, "%w, and letting the machine go: %w; it is tried again until it answers", cause, err)
		}
	}
	t.undone(cause)
	return cause
}

func phases(r window.Result) *monitorv1.CapturePhases {
	return &monitorv1.CapturePhases{
		Precopy: int64(r.Precopy), Rounds: uint32(r.Rounds), SyncDisk: int64(r.SyncDisk),
		Stop: int64(r.Times.Stop), Devices: int64(r.Times.Devices), Switch: int64(r.Times.Switch),
		Pages: int64(r.Times.Pages), Resume: int64(r.Times.Resume), Downtime: int64(r.Times.Downtime),
		PrecopiedBytes: r.PrecopiedBytes, WindowBytes: r.WindowBytes,
	}
}

// syncFile has the host write what the hypervisor has written to its disk.
func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return errdefs.New(errdefs.Storage, "sync disk: %w", err)
	}
	defer f.Close()
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return errdefs.New(errdefs.Storage, "sync disk %q: %w", path, err)
	}
	return nil
}

// dataPages are the pages of a memory file that may not be zero: those that
// are no holes.
func dataPages(path string, memoryBytes int64) (*dirty.Set, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "look into memory file: %w", err)
	}
	defer f.Close()
	set := dirty.NewSet(memoryBytes)
	for from := int64(0); from < memoryBytes; {
		data, err := unix.Seek(int(f.Fd()), from, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // nothing but a hole
		}
		hole := memoryBytes
		if err == nil {
			hole, err = unix.Seek(int(f.Fd()), data, unix.SEEK_HOLE)
		}
		if err != nil {
			return nil, errdefs.New(errdefs.Storage, "look into memory file %q: %w", path, err)
		}
		hole = min(hole, memoryBytes)
		first := data / dirty.PageSize
		set.Add(first, (hole+dirty.PageSize-1)/dirty.PageSize-first)
		from = hole
	}
	return set, nil
}
