//go:build linux

// Package process is the body of a monitor process: the parent of one
// machine's QEMU. It launches or adopts the run, keeps the conversation with the
// guest agent, answers on the monitor's socket, begins a new run when the guest
// reboots, and writes the run record before each change of phase. It decides
// nothing about the machine: it does what its socket is told.
package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/signal"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/captures"
	"github.com/holdpoint/holdpoint/internal/monitor/outlet"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
	"github.com/holdpoint/holdpoint/internal/monitor/stall"
)

// Config is what the monitor process is given besides the files in its folder.
type Config struct {
	// Dir is the run's folder, with config.json in it.
	Dir        string
	Hypervisor machine.Hypervisor
	// HypervisorVersion is shown in the status ("7.2.22"); may be empty.
	HypervisorVersion string
	// Files is the door to the disk; nil is the usual one.
	Files *durable.FS
	// Log gets what is worth telling people; nil discards it.
	Log *slog.Logger
	// Build is this binary's.
	Build string
}

// Run is the body of the monitor process; it returns when the run has ended,
// or when the process was asked to go (SIGTERM, SIGINT, or ctx): then the
// machine runs on and a successor can adopt it. Without a record in the folder
// it launches the run, with one it is the successor and adopts it. A second
// monitor of one folder gets CONFLICT and touches nothing.
func Run(ctx context.Context, cfg Config) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	tune()
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	lock, err := monitor.TakeLock(cfg.Dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	m, err := open(cfg)
	if err != nil {
		return err
	}
	return m.live(ctx)
}

// tune makes the Go runtime fit for a process that mostly waits and of which
// there is one per machine: two threads of Go code are enough to copy in both
// directions, and garbage is collected early rather than kept.
func tune() {
	runtime.GOMAXPROCS(2)
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(64 << 20)
}

// supervisor is the state of the process. Its life: open reads the files; begin
// launches or adopts a run; serve answers callers; live waits for the run's
// end, begins the next one after a reboot, and finishes.
type supervisor struct {
	Config
	cfg      monitor.Config
	captures *captures.Captures
	stall    *stall.Watch
	outlet   *outlet.Outlet

	// turn is held by whoever changes the run: one change at a time.
	turn chan struct{}
	// clock is held by whoever corrects the guest's clock.
	clock chan struct{}

	// mu guards the rest.
	mu  sync.Mutex
	rec monitor.Record
	// run is nil while there is none: before begin, and during a reboot.
	run machine.Run
	// linked is the conversation with the guest agent, nil while there is none;
	// link is the same once the guest has been told who it is.
	linked, link *relay.Conversation
	// trouble is why there is none, for people.
	trouble  string
	refusals relay.Refusals
	// adopted says that the run was another monitor's.
	adopted bool
	// killed says that the run's end was ordered: a reboot does not follow.
	killed bool
	// attempt is the shutdown under way, nil for none.
	attempt *attempt
	// asking, not nil, is closed when the guest's answer to Shutdown has been
	// recorded, or is not to come.
	asking chan struct{}
	// lost says that the run was begun and its record is gone.
	lost bool
	// left says that the record is a successor's to write.
	left bool
	// changed is closed and replaced at each change of the status.
	changed chan struct{}
}

func open(cfg Config) (*supervisor, error) {
	file, err := monitor.ReadConfig(cfg.Dir)
	if err != nil {
		return nil, err
	}
	if file.Run.Dir != cfg.Dir {
		return nil, errdefs.New(errdefs.Invalid, "run %s: its config names folder %q, not %q", file.Run.RunID, file.Run.Dir, cfg.Dir)
	}
	m := &supervisor{Config: cfg, cfg: file, turn: make(chan struct{}, 1), clock: make(chan struct{}, 1), changed: make(chan struct{})}
	m.captures = captures.New(captures.Config{Supervisor: m, Platform: cfg.Hypervisor.Platform, Log: cfg.Log})
	if m.outlet, err = outlet.New(file.Network, cfg.Log); err != nil {
		return nil, err
	}
	m.stall = stall.New(stall.Config{Supervisor: m, Free: durable.FreeBytes, Log: cfg.Log})
	if _, err = link.MagicIn(file.Run.Cmdline); err != nil {
		return nil, err
	}
	if err := m.Files.RemoveTemps(cfg.Dir); err != nil {
		return nil, err
	}
	m.rec, err = monitor.ReadRecord(cfg.Dir)
	switch {
	case errdefs.Is(err, errdefs.NotFound):
		m.rec = monitor.Record{MachineID: file.Run.MachineID, RunID: file.Run.RunID, Disk: file.Run.Disk}
	case err != nil:
		return nil, err
	case m.rec.Phase == monitor.Exited:
		return nil, errdefs.New(errdefs.WrongState, "run %s has ended (%s); start a new one", m.rec.RunID, m.rec.Exit.Why())
	}
	return m, nil
}

// live is the whole life of the process after open.
func (m *supervisor) live(ctx context.Context) error {
	defer m.captures.Close()
	run, err := m.begin(ctx)
	if err != nil {
		return m.failed(ctx, err)
	}
	if run == nil {
		return nil // a successor of a run that is over: the record says so
	}
	srv, err := m.listen(m.cfg.Socket())
	if err != nil {
		return errors.Join(err, run.Close())
	}
	err = m.wait(ctx, run)
	m.mu.Lock()
	m.left = true
	m.mu.Unlock()
	srv.close()
	return err
}

// wait follows the run, and those that follow it after reboots, to the end.
func (m *supervisor) wait(ctx context.Context, run machine.Run) error {
	for {
		ended := m.follow(ctx, run)
		if !ended {
			return m.leave(run)
		}
		exit := run.Exit()
		m.Log.Info("run ended", "run", m.status().GetRunId(), "reason", exit.Reason, "message", exit.Message)
		next, err := m.after(ctx, exit)
		if err != nil {
			return m.failed(ctx, err)
		}
		if next == nil {
			return nil
		}
		run = next
	}
}

// follow keeps the agent link of the run, and watches for its hypervisor to
// stop it, until it has ended, or ctx has.
func (m *supervisor) follow(ctx context.Context, run machine.Run) (ended bool) {
	linkCtx, cancel := context.WithCancel(ctx)
	var kept sync.WaitGroup
	kept.Go(func() { m.keepLink(linkCtx, run) })
	kept.Go(func() { m.stall.Keep(linkCtx, run) })
	kept.Go(func() { m.outlet.Keep(linkCtx, run, m.awaitOutlet) })
	select {
	case <-run.Exited():
		ended = true
	case <-ctx.Done():
		ended = machine.Ended(run)
	}
	if ended {
		m.hearOut()
	}
	cancel()
	kept.Wait()
	return ended
}

// hearOut waits for what the guest said before its end: the answer to Shutdown
// may still be in the link's buffers. The end of the link ends the wait.
func (m *supervisor) hearOut() {
	m.mu.Lock()
	asking := m.asking
	m.mu.Unlock()
	if asking == nil {
		return
	}
	limit := time.NewTimer(changeTimeout)
	defer limit.Stop()
	select {
	case <-asking:
	case <-limit.C:
	}
}

// leave lets go of a run that goes on, when no change of it is under way.
func (m *supervisor) leave(run machine.Run) error {
	m.captures.Close()
	m.turn <- struct{}{} // bounded: each change has its own deadline
	defer func() { <-m.turn }()
	m.Log.Info("leaving the run to a successor", "run", m.status().GetRunId())
	return run.Close()
}

// after decides what follows a run's end: nil for nothing.
func (m *supervisor) after(ctx context.Context, exit machine.Exit) (machine.Run, error) {
	m.turn <- struct{}{} // bounded: each change has its own deadline
	defer func() { <-m.turn }()
	m.mu.Lock()
	killed := m.killed
	m.run = nil
	m.mu.Unlock()
	if exit.Reason == machine.GuestReset && killed {
		exit.Reason = machine.Killed
	}
	if exit.Reason != machine.GuestReset {
		m.finish(exit)
		return nil, nil
	}
	return m.reboot(ctx)
}

// finish records the run's end. The record is the truth that outlives us; when
// it cannot be written, a successor finds the process gone and says crashed.
func (m *supervisor) finish(exit machine.Exit) {
	err := m.record(func(r *monitor.Record) {
		r.Phase = monitor.Exited
		r.Exit = &monitor.Exit{Exit: exit, Clean: r.SaidClean && exit.Reason == machine.GuestShutdown}
	})
	if err != nil {
		m.Log.Error("the end of the run is not recorded", "error", err)
	}
}

// failed records why there is no run, so that the starter can tell its kind. A
// launch that was interrupted is no failure, a process that was recorded and
// could not be adopted may live, and so may one whose record is gone: a
// successor tries again.
func (m *supervisor) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil || m.rec.Process != nil || m.lost {
		return err
	}
	if pids, found := monitor.Living(m.Dir); found != nil || len(pids) > 0 {
		return errors.Join(err, found) // no end that is not proven is recorded
	}
	recErr := m.record(func(r *monitor.Record) {
		r.Phase = monitor.Exited
		r.Failure = &monitor.Failure{Kind: errdefs.KindOf(err), Message: err.Error()}
		r.Exit = &monitor.Exit{Exit: machine.Exit{Reason: machine.Crashed, Message: err.Error()}}
	})
	return errors.Join(err, recErr)
}

// record makes a change durable, and then visible.
func (m *supervisor) record(change func(*monitor.Record)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left {
		return errdefs.New(errdefs.WrongState, "record of run %s: this monitor is leaving", m.rec.RunID)
	}
	return m.write(change, false)
}

// write makes a change of the record. Visible is it only if it is durable, or
// at all events. The caller holds mu.
func (m *supervisor) write(change func(*monitor.Record), atAllEvents bool) error {
	rec := m.rec.Clone()
	change(&rec)
	err := monitor.WriteRecord(m.Files, m.Dir, rec)
	if err != nil && rec.Phase != monitor.Exited && !atAllEvents {
		return err
	}
	m.rec = rec
	m.notify()
	return err
}

// update makes a change that is not recorded visible.
func (m *supervisor) update(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
	m.notify()
}

// notify wakes all who watch. The caller holds mu.
func (m *supervisor) notify() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// changeTimeout bounds one change of the run: a hypervisor that does not
// answer a command for so long is taken for hung and the change for failed.
// undoTimeout bounds the taking back of a change that failed.
const (
	changeTimeout = 30 * time.Second
	undoTimeout   = 10 * time.Second
)

// undoing is a context to take a change back with: the change's own may have
// ended, which is why it failed.
func undoing(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
}

// change runs f, which verb names, on the run, alone, once it is its turn. f is
// not ended by the caller's going away, which would leave the change half made.
func (m *supervisor) change(ctx context.Context, verb string, f func(ctx context.Context, run machine.Run) error) error {
	release, err := m.Turn(ctx)
	if err != nil {
		return fmt.Errorf("%s machine %s: %w", verb, m.name(), err)
	}
	defer release()
	m.mu.Lock()
	run, rec := m.run, m.rec
	m.mu.Unlock()
	if run == nil {
		return errdefs.New(errdefs.WrongState, "%s machine %s: its run %s has ended", verb, m.name(), rec.RunID)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	err = f(ctx, run)
	if err != nil && errdefs.Is(err, errdefs.Deadline) {
		return errdefs.New(errdefs.Deadline, "%s machine %s: its hypervisor did not answer within %s: %w", verb, m.name(), changeTimeout, err)
	}
	return err
}
