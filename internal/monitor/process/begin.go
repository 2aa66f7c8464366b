//go:build linux

package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/captures"
	"github.com/holdpoint/holdpoint/internal/monitor/layers"
)

// launchTimeout bounds the start or adoption of the hypervisor's process. It
// takes 0.1 s on an idle host; a host so busy that it takes this long does
// better with one machine less.
const launchTimeout = 60 * time.Second

// begin launches or adopts the run and lets it go, unless a user has paused
// it. It gives nil when the run has ended without a monitor.
func (m *supervisor) begin(ctx context.Context) (machine.Run, error) {
	if m.rec.Phase == "" {
		if err := monitor.CheckLost(m.Dir); err != nil {
			m.lost = true
			return nil, err
		}
		return m.launch(ctx)
	}
	if m.rec.Process == nil {
		// Our predecessor may have died between the start of a process and the
		// record of it. The guest has executed nothing.
		return m.launch(ctx)
	}
	return m.adopt(ctx)
}

// launch begins the run of the record: first the intent, then the process,
// then its identity, then its first instruction. Whatever process of an earlier
// run is left, none of which the record knows any more, is ended before.
func (m *supervisor) launch(ctx context.Context) (machine.Run, error) {
	err := m.record(func(r *monitor.Record) {
		r.Phase, r.Process, r.Switching, r.SaidClean, r.ReadyUnixNano = monitor.Booting, nil, false, false, 0
		r.ClosedSockets, r.Head = 0, ""
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, launchTimeout)
	defer cancel()
	err = errors.Join(monitor.MarkBegun(m.Files, m.Dir), monitor.MarkChildren(m.Dir, m.rec.RunID), monitor.EndLiving(ctx, m.Dir))
	if err != nil {
		return nil, err
	}
	run, err := m.Hypervisor.Launch(ctx, m.runConfig())
	if err != nil {
		return nil, err
	}
	p := run.Process()
	m.mu.Lock()
	m.run, m.adopted = run, false
	m.mu.Unlock()
	err = m.record(func(r *monitor.Record) { r.Process = &p })
	if err == nil && !m.standby() {
		err = run.Resume(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, m.discard(ctx, run))
	}
	m.Log.Info("run launched", "run", m.rec.RunID, "pid", p.PID)
	return run, nil
}

// discard ends a run that could not be begun in full. Process stays nil in the
// record only if nothing is left of it.
func (m *supervisor) discard(ctx context.Context, run machine.Run) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	err := run.Kill(ctx)
	p := run.Process()
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil && !errdefs.Is(err, errdefs.WrongState) { // WRONG_STATE: it has ended by itself
		m.rec.Process = &p
		return err
	}
	m.run, m.rec.Process = nil, nil
	return nil
}

// adopt takes over the process of the record and completes the step that our
// predecessor may have left half done.
func (m *supervisor) adopt(ctx context.Context) (machine.Run, error) {
	limited, cancel := context.WithTimeout(ctx, launchTimeout)
	defer cancel()
	run, err := m.Hypervisor.Adopt(limited, m.runConfig(), *m.rec.Process)
	if errdefs.Is(err, errdefs.NotFound) {
		if err := m.proveEnd(limited); err != nil {
			return nil, err
		}
		return m.after(ctx, m.autopsy())
	}
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.run, m.adopted = run, true
	m.mu.Unlock()
	m.Log.Info("run adopted", "run", m.rec.RunID, "pid", m.rec.Process.PID, "phase", m.rec.Phase)
	if err := m.settle(limited, run); err != nil && !machine.Ended(run) {
		return nil, errors.Join(err, run.Close())
	}
	return run, nil
}

// proveEnd makes sure that nothing of the run lives, whose recorded process the
// hypervisor did not find: that one may be about to end, and another one means
// that the record is not of this run's present.
func (m *supervisor) proveEnd(ctx context.Context) error {
	for {
		pids, err := monitor.Living(m.Dir)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if pid != m.rec.Process.PID {
				return errdefs.New(errdefs.OutcomeUnknown, "machine %s: process %d of this run lives, but its record names process %d, which has ended; stop it by force", m.name(), pid, m.rec.Process.PID)
			}
			if err := monitor.AwaitEnd(ctx, pid); err != nil {
				return fmt.Errorf("machine %s: its process %d is ending: %w", m.name(), pid, err)
			}
		}
	}
}

// autopsy says how a run ended that no monitor watched. What happened before
// the host's last boot is a crash, however well the run ended: the host's own
// caches died with it.
func (m *supervisor) autopsy() machine.Exit {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil || strings.TrimSpace(string(boot)) != m.rec.Process.BootID {
		return machine.Exit{Reason: machine.Crashed, Message: "the host was restarted"}
	}
	if coroner, ok := m.Hypervisor.(machine.Coroner); ok {
		return coroner.ExitOf(m.runConfig())
	}
	return machine.Exit{Reason: machine.Crashed, Message: "the process ended while no monitor watched it"}
}

// settle makes an adopted machine what its record says: paused if a user
// paused it or a capture keeps it so, still if it has never run, running in
// every other phase.
func (m *supervisor) settle(ctx context.Context, run machine.Run) error {
	drop, err := captures.Inherit(m.rec)
	if err != nil {
		m.Log.Warn("what a capture left that was interrupted is not removed", "error", err)
	}
	switch {
	case m.standby():
		return nil
	case m.rec.Phase == monitor.UserPaused || m.rec.Phase == monitor.Held:
		err = run.Pause(ctx)
	default:
		err = run.Resume(ctx)
	}
	if err == nil && m.rec.Phase != monitor.Window { // of which the captures know what it has done
		err = layers.Settle(ctx, m, run, m.Log)
	}
	if err != nil || !drop && m.rec.Phase != monitor.Window {
		return err
	}
	return m.record(func(r *monitor.Record) {
		if drop {
			r.Capture = nil
		}
		if r.Phase == monitor.Window {
			r.Phase, r.Switching = r.Resumed(), false // the last layer is in use, or empty
		}
	})
}

// reboot begins a new run of the same machine, with the chain as it is now.
func (m *supervisor) reboot(ctx context.Context) (machine.Run, error) {
	m.mu.Lock()
	m.rec.RunID = durable.NewID()
	m.mu.Unlock()
	return m.launch(ctx)
}
