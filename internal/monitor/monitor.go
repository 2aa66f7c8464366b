//go:build linux

package monitor

import (
	"context"
	"errors"
	"log/slog"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// RunConfig is what the monitor process is given besides the files in its folder.
type RunConfig struct {
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
func Run(ctx context.Context, cfg RunConfig) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	tune()
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	lock, err := takeLock(cfg.Dir)
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

// monitor is the state of the process. Its life: open reads the files; begin
// launches or adopts a run; serve answers callers; live waits for the run's
// end, begins the next one after a reboot, and finishes.
type monitor struct {
	RunConfig
	cfg   Config
	guest guestLink

	// turn is held by whoever changes the run: one change at a time.
	turn chan struct{}

	// mu guards the rest.
	mu  sync.Mutex
	rec Record
	// run is nil while there is none: before begin, and during a reboot.
	run machine.Run
	// link is the conversation with the guest agent, nil while there is none.
	link *conversation
	// trouble is why there is none, for people.
	trouble string
	// killed says that the run's end was ordered: a reboot does not follow.
	killed bool
	// shutting says that a Shutdown is under way.
	shutting bool
	// asking, not nil, is closed when the guest's answer to Shutdown has been
	// recorded, or is not to come.
	asking chan struct{}
	// changed is closed and replaced at each change of the status.
	changed chan struct{}
}

func open(cfg RunConfig) (*monitor, error) {
	file, err := ReadConfig(cfg.Dir)
	if err != nil {
		return nil, err
	}
	if file.Run.Dir != cfg.Dir {
		return nil, errdefs.New(errdefs.Invalid, "run %s: its config names folder %q, not %q", file.Run.RunID, file.Run.Dir, cfg.Dir)
	}
	m := &monitor{RunConfig: cfg, cfg: file, turn: make(chan struct{}, 1), changed: make(chan struct{})}
	m.guest = guestLink{told: file.Guest, log: cfg.Log}
	if m.guest.magic, err = parseMagic(file.Run.Cmdline); err != nil {
		return nil, err
	}
	if err := m.Files.RemoveTemps(cfg.Dir); err != nil {
		return nil, err
	}
	m.rec, err = ReadRecord(cfg.Dir)
	switch {
	case errdefs.Is(err, errdefs.NotFound):
		m.rec = Record{MachineID: file.Run.MachineID, RunID: file.Run.RunID, Disk: file.Run.Disk}
	case err != nil:
		return nil, err
	case m.rec.Phase == Exited:
		return nil, errdefs.New(errdefs.WrongState, "run %s has ended (%s); start a new one", m.rec.RunID, m.rec.Exit.reason())
	}
	return m, nil
}

func (e *Exit) reason() string {
	if e == nil {
		return "never launched"
	}
	return string(e.Reason)
}

// live is the whole life of the process after open.
func (m *monitor) live(ctx context.Context) error {
	run, err := m.begin(ctx)
	if err != nil {
		return m.failed(ctx, err)
	}
	if run == nil {
		return nil // a successor of a run that is over: the record says so
	}
	srv, err := m.listen(filepath.Join(m.cfg.Run.SocketDir, socketFile))
	if err != nil {
		return errors.Join(err, run.Close())
	}
	err = m.wait(ctx, run)
	srv.close()
	return err
}

// wait follows the run, and those that follow it after reboots, to the end.
func (m *monitor) wait(ctx context.Context, run machine.Run) error {
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

// follow keeps the agent link of the run until it has ended, or ctx has.
func (m *monitor) follow(ctx context.Context, run machine.Run) (ended bool) {
	linkCtx, cancel := context.WithCancel(ctx)
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		m.keepLink(linkCtx, run)
	}()
	select {
	case <-run.Exited():
		ended = true
	case <-ctx.Done():
		ended = hasEnded(run)
	}
	if ended {
		m.hearOut()
	}
	cancel()
	<-kept
	return ended
}

// hearOut waits for what the guest said before its end: the answer to Shutdown
// may still be in the link's buffers. The end of the link ends the wait.
func (m *monitor) hearOut() {
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
func (m *monitor) leave(run machine.Run) error {
	m.turn <- struct{}{} // bounded: each change has its own deadline
	defer func() { <-m.turn }()
	m.Log.Info("leaving the run to a successor", "run", m.status().GetRunId())
	return run.Close()
}

// after decides what follows a run's end: nil for nothing.
func (m *monitor) after(ctx context.Context, exit machine.Exit) (machine.Run, error) {
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
func (m *monitor) finish(exit machine.Exit) {
	err := m.record(func(r *Record) {
		r.Phase = Exited
		r.Exit = &Exit{Exit: exit, Clean: r.SaidClean && exit.Reason == machine.GuestShutdown}
	})
	if err != nil {
		m.Log.Error("the end of the run is not recorded", "error", err)
	}
}

// failed records why there is no run, so that the starter can tell its kind. A
// launch that was interrupted is no failure, and a process that was recorded
// and could not be adopted may live: a successor tries again.
func (m *monitor) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil || m.rec.Process != nil {
		return err
	}
	recErr := m.record(func(r *Record) {
		r.Phase = Exited
		r.Failure = &Failure{Kind: errdefs.KindOf(err), Message: err.Error()}
		r.Exit = &Exit{Exit: machine.Exit{Reason: machine.Crashed, Message: err.Error()}}
	})
	return errors.Join(err, recErr)
}

// record makes a change durable, and then visible.
func (m *monitor) record(change func(*Record)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	rec := m.rec.clone()
	change(&rec)
	err := writeRecord(m.Files, m.Dir, rec)
	if err != nil && rec.Phase != Exited {
		return err
	}
	m.rec = rec
	m.notify()
	return err
}

// update makes a change that is not recorded visible.
func (m *monitor) update(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
	m.notify()
}

// notify wakes all who watch. The caller holds mu.
func (m *monitor) notify() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// changeTimeout bounds one change of the run: a hypervisor that does not
// answer a command for so long is taken for hung and the change for failed.
const changeTimeout = 30 * time.Second

// change runs f on the run, alone, once it is its turn. f is not ended by the
// caller's going away, which would leave the change half made.
func (m *monitor) change(ctx context.Context, f func(ctx context.Context, run machine.Run) error) error {
	select {
	case m.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-m.turn }()
	m.mu.Lock()
	run, rec := m.run, m.rec
	m.mu.Unlock()
	if run == nil {
		return errdefs.New(errdefs.WrongState, "machine %s: its run %s has ended", rec.MachineID, rec.RunID)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	return f(ctx, run)
}
