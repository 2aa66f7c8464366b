//go:build linux

// Package fleet keeps hold of the monitors of all machines: it begins runs,
// adopts those an earlier daemon began, follows their status, and puts a
// successor in the place of a monitor that died. It decides nothing about
// machines and records nothing.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/runs"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// keptRuns is how many ended runs of a machine keep their console and logs.
const keptRuns = 5

// endTimeout bounds the end of a run that could not be begun.
const endTimeout = 30 * time.Second

// Config is what a fleet needs.
type Config struct {
	Home  *home.Home
	Files *durable.FS
	// MonitorCommand is the hidden verb's program and first arguments; the
	// run's folder is added.
	MonitorCommand []string
	Log            *slog.Logger
	// Exited is called when a machine's current run has ended, until it says
	// that the end is recorded.
	Exited func(machineID string, run *Run) (recorded bool)
}

// Fleet is the monitors of all machines. Close lets go of them; they run on.
type Fleet struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	current map[string]*Run
}

// New returns an empty fleet.
func New(cfg Config) *Fleet {
	ctx, cancel := context.WithCancel(context.Background())
	return &Fleet{cfg: cfg, ctx: ctx, cancel: cancel, current: map[string]*Run{}}
}

// Close lets go of all monitors and waits for what the fleet itself runs.
func (f *Fleet) Close() {
	f.cancel()
	f.wg.Wait()
}

// Start begins a run in a folder of its own. It is not the machine's current
// one until SetCurrent. On error nothing runs and no folder is left.
func (f *Fleet) Start(ctx context.Context, cfg monitor.Config) (*Run, error) {
	dir, sockets := cfg.Run.Dir, cfg.Run.SocketDir
	var steps undo.Stack
	defer steps.Run()
	for _, folder := range []string{dir, sockets} {
		if err := f.cfg.Files.MkdirAll(folder); err != nil {
			return nil, fmt.Errorf("begin run of %s: %w", cfg.Run.MachineName, err)
		}
		steps.Add(func() { f.remove(folder) })
	}
	if err := monitor.WriteConfig(f.cfg.Files, dir, cfg); err != nil {
		return nil, fmt.Errorf("begin run of %s: %w", cfg.Run.MachineName, err)
	}
	steps.Add(func() { f.end(dir) })
	client, err := monitor.Start(ctx, f.startConfig(dir))
	if err != nil && ctx.Err() == nil && diedSilently(dir) {
		f.cfg.Log.Warn("a monitor died while it began a run, starting its successor", "dir", dir, "error", err)
		client, err = monitor.Ensure(ctx, f.startConfig(dir))
	}
	if err != nil {
		return nil, err
	}
	steps.Release()
	run := f.newRun(cfg.Run.MachineID, cfg.Run.RunID, dir)
	f.follow(run, client)
	return run, nil
}

// diedSilently reports whether the monitor of a folder is gone without a
// record of why: something of the run may be left, which a successor ends or
// goes on with.
func diedSilently(dir string) bool {
	record, err := monitor.ReadRecord(dir)
	if err != nil {
		return true
	}
	return record.Phase != monitor.Exited && record.Failure == nil
}

// end ends whatever is left of a run that could not be begun.
func (f *Fleet) end(dir string) {
	if ended(dir) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	if err := monitor.KillRun(ctx, f.cfg.Files, dir); err != nil {
		f.cfg.Log.Warn("end a run that could not be begun", "dir", dir, "error", err)
	}
}

// Adopt takes hold of the run in a folder that an earlier daemon made: its
// living monitor, or a successor. It waits until ctx ends for that; then the
// run is lost until its monitor is found, which goes on being tried. A run
// that has ended ends here, too.
func (f *Fleet) Adopt(ctx context.Context, machineID, runID string) *Run {
	run := f.newRun(machineID, runID, f.cfg.Home.Run(runID))
	f.follow(run, nil)
	for {
		run.mu.Lock()
		phase := run.status.GetPhase()
		alive := phase != monitorv1.Phase_PHASE_UNSPECIFIED && phase != monitorv1.Phase_PHASE_EXITED
		changed, found := run.changed, alive || run.ended || run.lost != nil
		run.mu.Unlock()
		if found {
			return run
		}
		select {
		case <-changed:
		case <-ctx.Done():
			run.setLost(fmt.Errorf("look for its monitor: %w", context.Cause(ctx)))
			return run
		}
	}
}

func (f *Fleet) startConfig(dir string) monitor.StartConfig {
	return monitor.StartConfig{Dir: dir, Executable: f.cfg.MonitorCommand[0], Args: append(slices.Clone(f.cfg.MonitorCommand[1:]), dir)}
}

// Current is the machine's run; nil when it has none.
func (f *Fleet) Current(machineID string) *Run {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.current[machineID]
}

// SetCurrent makes run the machine's current one; nil: it has none. A run that
// has ended meanwhile is told to Exited.
func (f *Fleet) SetCurrent(machineID string, run *Run) {
	f.mu.Lock()
	if run == nil {
		delete(f.current, machineID)
	} else {
		f.current[machineID] = run
	}
	f.mu.Unlock()
	if run != nil && run.Ended() {
		f.tell(run)
	}
}

// tell tells of the end of a current run, and reports whether that is recorded
// or nobody wants to know.
func (f *Fleet) tell(run *Run) bool {
	machineID := run.owner()
	if f.Current(machineID) != run {
		return true
	}
	if f.cfg.Exited != nil && !f.cfg.Exited(machineID, run) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.current[machineID] == run {
		delete(f.current, machineID)
	}
	return true
}

// Tidy removes what ended runs of a machine left, memory above all, but for
// the logs and records of the newest few. keep are the runs that still live.
func (f *Fleet) Tidy(machineID string, keep ...string) {
	dirs, err := runs.Of(f.cfg.Home.Runs(), machineID)
	if err != nil {
		return
	}
	old := slices.DeleteFunc(dirs, func(dir string) bool { return slices.Contains(keep, filepath.Base(dir)) })
	for i, dir := range old {
		if !ended(dir) { // a monitor whose run has ended is about to leave, and needs nothing
			continue
		}
		f.remove(f.cfg.Home.RunSockets(filepath.Base(dir)))
		if i >= keptRuns {
			f.remove(dir)
		} else {
			f.strip(dir)
		}
	}
}

// strip removes all but logs and records from the folder of an ended run.
func (f *Fleet) strip(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, entry := range entries {
		if ext := filepath.Ext(entry.Name()); ext != ".log" && ext != ".json" && ext != ".lock" {
			f.remove(filepath.Join(dir, entry.Name()))
		}
	}
}

// Forget removes the folders of all runs of a machine; they have ended.
func (f *Fleet) Forget(machineID string) {
	dirs, err := runs.Of(f.cfg.Home.Runs(), machineID)
	if err != nil {
		f.cfg.Log.Warn("look for the runs of a machine that is removed", "machine", machineID, "error", err)
	}
	for _, dir := range dirs {
		f.Discard(filepath.Base(dir))
	}
}

// End ends whatever is left of a run that nobody has adopted, a monitor that is
// just starting included, and removes its folders once nothing is.
func (f *Fleet) End(runID string) error {
	dir := f.cfg.Home.Run(runID)
	ctx, cancel := context.WithTimeout(f.ctx, endTimeout)
	defer cancel()
	if err := monitor.KillRun(ctx, f.cfg.Files, dir); err != nil {
		return err
	}
	f.Discard(runID)
	return nil
}

// Discard removes the folders of a run that has ended.
func (f *Fleet) Discard(runID string) {
	f.remove(f.cfg.Home.RunSockets(runID))
	f.remove(f.cfg.Home.Run(runID))
}

func (f *Fleet) remove(dir string) {
	if err := f.cfg.Files.RemoveAll(dir); err != nil {
		f.cfg.Log.Warn("remove run folder", "dir", dir, "error", err)
	}
}

// successor finds the run's monitor or starts one. It tries until it has one,
// the run's end is proven, or the fleet is closed.
func (f *Fleet) successor(run *Run) (*monitor.Client, error) {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 10*time.Second) {
		client, err := f.ensure(run.dir)
		if err == nil {
			return client, nil
		}
		if ended(run.dir) {
			return nil, err
		}
		run.setLost(err)
		f.cfg.Log.Error("find the monitor of a run", "dir", run.dir, "error", err, "again_in", wait)
		select {
		case <-f.ctx.Done():
			return nil, errors.Join(err, f.ctx.Err())
		case <-run.wake:
		case <-time.After(wait):
		}
	}
}

func (f *Fleet) ensure(dir string) (*monitor.Client, error) {
	ctx, cancel := context.WithTimeout(f.ctx, endTimeout)
	defer cancel()
	return monitor.Ensure(ctx, f.startConfig(dir))
}

// ended reports whether a run's end is proven: by its record, or because
// neither a monitor nor any process that carries its mark lives.
func ended(dir string) bool {
	if record, err := monitor.ReadRecord(dir); err == nil && record.Phase == monitor.Exited {
		return true
	}
	alive, err := monitor.Alive(dir)
	if err != nil || alive {
		return false
	}
	living, err := monitor.Living(dir)
	return err == nil && len(living) == 0
}
