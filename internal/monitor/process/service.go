//go:build linux

package process

import (
	"context"
	"os"
	"slices"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/api/monitor/v1/monitorv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// service answers MonitorService.
type service struct {
	m *supervisor
	monitorv1connect.UnimplementedMonitorServiceHandler
}

// status is what the monitor knows now.
func (m *supervisor) status() *monitorv1.StatusResponse {
	m.mu.Lock()
	defer m.mu.Unlock()
	st := &monitorv1.StatusResponse{
		Protocol:      monitor.ProtocolVersion,
		MachineId:     m.rec.MachineID,
		RunId:         m.rec.RunID,
		Phase:         m.rec.Phase.Proto(),
		MonitorPid:    int64(os.Getpid()),
		Build:         m.Build,
		Ready:         m.link != nil,
		Exit:          m.rec.Exit.Proto(),
		ReadyUnixNano: m.rec.ReadyUnixNano,
		Accelerator:   m.cfg.Run.Accelerator,
		QemuVersion:   m.HypervisorVersion,
		Trouble:       m.trouble,
		Disk:          monitor.LayerIDs(m.rec.Disk),
		Waiting:       m.cfg.Wait && m.rec.Activation == nil,
		Linked:        m.linked != nil,
		Tracking:      m.captures.Tracking(),
		ClosedSockets: m.rec.ClosedSockets,
	}
	if m.rec.Process != nil {
		st.QemuPid = int64(m.rec.Process.PID)
		st.CpuNano = cpuTime(m.rec.Process.PID)
	}
	return st
}

// watch calls f with the status now and after each change, until f says that
// it has enough, the run has ended, or ctx has. Changes that follow each other
// faster than f returns may be told as one; the last one never is left out.
func (m *supervisor) watch(ctx context.Context, f func(*monitorv1.StatusResponse) (enough bool, err error)) error {
	for {
		m.mu.Lock()
		changed := m.changed
		m.mu.Unlock()
		st := m.status()
		enough, err := f(st)
		if enough || err != nil || st.GetExit() != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// cpuTime is the CPU time that the process has used, in nanoseconds; 0 when it
// is gone. Its clock's id is that of clock_getcpuclockid(3).
func cpuTime(pid int) int64 {
	const scheduled = 2 // CPUCLOCK_SCHED
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|scheduled), &ts); err != nil {
		return 0
	}
	return ts.Nano()
}

// still reports whether the guest's CPUs stand still by order.
func (m *supervisor) still() bool {
	rec := m.present()
	return rec.Phase == monitor.UserPaused || rec.Phase == monitor.Held || m.standby()
}

// awaitResumed waits until the guest's CPUs run: the order to stand still is
// taken back before they do, by the change that has the turn.
func (m *supervisor) awaitResumed(ctx context.Context) error {
	err := m.watch(ctx, func(*monitorv1.StatusResponse) (bool, error) { return !m.still(), nil })
	if err != nil {
		return err
	}
	release, err := m.Turn(ctx)
	if err == nil {
		release()
	}
	return err
}

// Status answers at once.
func (s service) Status(context.Context, *connect.Request[monitorv1.StatusRequest]) (*connect.Response[monitorv1.StatusResponse], error) {
	return connect.NewResponse(s.m.status()), nil
}

// Watch ends after the run's end.
func (s service) Watch(ctx context.Context, _ *connect.Request[monitorv1.StatusRequest], out *connect.ServerStream[monitorv1.StatusResponse]) error {
	return wire.Encode(s.m.watch(ctx, func(st *monitorv1.StatusResponse) (bool, error) { return false, out.Send(st) }))
}

// Pause is recorded first: a successor completes it. Pausing twice is allowed.
func (s service) Pause(ctx context.Context, _ *connect.Request[monitorv1.PauseRequest]) (*connect.Response[monitorv1.PauseResponse], error) {
	err := s.m.change(ctx, "pause", func(ctx context.Context, run machine.Run) error {
		if s.m.present().Phase == monitor.UserPaused {
			return run.Pause(ctx)
		}
		if s.m.standby() {
			return s.m.waits("pause")
		}
		if err := s.m.record(func(r *monitor.Record) { r.Phase = monitor.UserPaused }); err != nil {
			return err
		}
		err := run.Pause(ctx)
		if err == nil || hasEnded(run) {
			return err
		}
		// Perhaps it is paused, and only the answer was lost.
		ctx, cancel := undoing(ctx)
		defer cancel()
		if undo := run.Resume(ctx); undo != nil && !hasEnded(run) {
			return errdefs.New(errdefs.OutcomeUnknown, "pause machine %s: %w, and resuming it again: %w; it may be running or paused: resume it", s.m.name(), err, undo)
		}
		if back := s.m.record(func(r *monitor.Record) { r.Phase = r.Resumed() }); back != nil {
			return back
		}
		return err
	})
	return connect.NewResponse(&monitorv1.PauseResponse{}), wire.Encode(err)
}

// Resume lets a machine go that stands still; one that runs is left alone.
func (s service) Resume(ctx context.Context, _ *connect.Request[monitorv1.ResumeRequest]) (*connect.Response[monitorv1.ResumeResponse], error) {
	err := s.m.change(ctx, "resume", s.m.resume)
	if err == nil {
		_ = s.m.onClock(ctx, func(conv *relay.Conversation) error {
			s.m.catchUp(ctx, conv)
			return nil
		})
	}
	return connect.NewResponse(&monitorv1.ResumeResponse{}), wire.Encode(err)
}

func (m *supervisor) resume(ctx context.Context, run machine.Run) error {
	if m.standby() {
		return m.waits("resume")
	}
	was, still := m.present().Phase, m.still()
	if still {
		if err := m.record(func(r *monitor.Record) { r.Phase = r.Resumed() }); err != nil {
			return err
		}
	}
	err := run.Resume(ctx)
	if err == nil || !still || hasEnded(run) {
		return err
	}
	// Perhaps it runs, and only the answer was lost.
	ctx, cancel := undoing(ctx)
	defer cancel()
	if undo := run.Pause(ctx); undo != nil && !hasEnded(run) {
		return errdefs.New(errdefs.OutcomeUnknown, "resume machine %s: %w, and pausing it again: %w; it may be running or paused: resume it", m.name(), err, undo)
	}
	if back := m.record(func(r *monitor.Record) { r.Phase = was }); back != nil {
		return back
	}
	return err
}

// SwitchDisk records the new chain first: booting from it is right whether or
// not the switch was made. Switching to what is the top already changes nothing.
func (s service) SwitchDisk(ctx context.Context, req *connect.Request[monitorv1.SwitchDiskRequest]) (*connect.Response[monitorv1.SwitchDiskResponse], error) {
	top := machine.Layer{ID: req.Msg.GetLayerId(), Path: req.Msg.GetPath(), Format: "qcow2"}
	err := s.m.change(ctx, "switch disk of", func(ctx context.Context, run machine.Run) error { return s.m.switchDisk(ctx, run, top) })
	return connect.NewResponse(&monitorv1.SwitchDiskResponse{}), wire.Encode(err)
}

func (m *supervisor) switchDisk(ctx context.Context, run machine.Run, top machine.Layer) error {
	m.mu.Lock()
	old := m.rec.Clone()
	m.mu.Unlock()
	last := old.Disk[len(old.Disk)-1]
	switch {
	case last == top && !old.Switching:
		return nil
	case old.Switching && last != top:
		return errdefs.New(errdefs.OutcomeUnknown, "switch disk of machine %s to layer %s: a switch to layer %s is not completed; repeat that one first", m.name(), top.ID, last.ID)
	case last != top && slices.ContainsFunc(old.Disk, func(l machine.Layer) bool { return l.ID == top.ID || l.Path == top.Path }):
		return errdefs.New(errdefs.Invalid, "switch disk of machine %s: layer %s is below its top already", m.name(), top.ID)
	case old.Phase != monitor.UserPaused:
		return errdefs.New(errdefs.WrongState, "switch disk of machine %s: it is %s; pause it first", m.name(), old.Phase)
	}
	if last != top {
		err := m.record(func(r *monitor.Record) { r.Disk, r.Switching = append(r.Disk, top), true })
		if err != nil {
			return err
		}
	}
	if err := run.SwitchDisk(ctx, top); err != nil {
		if old.Switching || hasEnded(run) || ctx.Err() != nil || errdefs.Is(err, errdefs.OutcomeUnknown) {
			return err // unknown: the longer chain stays, which is harmless
		}
		if back := m.record(func(r *monitor.Record) { r.Disk, r.Switching = old.Disk, false }); back != nil {
			return back
		}
		return err
	}
	return m.record(func(r *monitor.Record) { r.Switching = false })
}

// Kill ends the run as a power cut would.
func (s service) Kill(ctx context.Context, _ *connect.Request[monitorv1.KillRequest]) (*connect.Response[monitorv1.KillResponse], error) {
	err := s.m.change(ctx, "kill", func(ctx context.Context, run machine.Run) error {
		s.m.mu.Lock()
		s.m.killed = true
		s.m.mu.Unlock()
		err := run.Kill(ctx)
		if errdefs.Is(err, errdefs.WrongState) {
			return nil // it ended meanwhile
		}
		return err
	})
	if err != nil && s.m.status().GetExit() == nil {
		return nil, wire.Encode(err)
	}
	st, err := s.m.awaitExit(ctx, s.m.status().GetRunId())
	return connect.NewResponse(&monitorv1.KillResponse{Exit: st.GetExit()}), wire.Encode(err)
}

// awaitExit waits until the end of the run is recorded.
func (m *supervisor) awaitExit(ctx context.Context, runID string) (st *monitorv1.StatusResponse, err error) {
	err = m.watch(ctx, func(now *monitorv1.StatusResponse) (bool, error) {
		st = now
		if now.GetRunId() != runID {
			return true, errdefs.New(errdefs.WrongState, "machine %s rebooted instead of stopping", m.name())
		}
		return false, nil
	})
	return st, err
}
