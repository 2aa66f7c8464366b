//go:build linux

package process

import (
	"cmp"
	"context"
	"os"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/api/monitor/v1/monitorv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/layers"
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
		Trouble:       cmp.Or(m.stall.Why(), m.trouble),
		Refused:       m.refusals.Why(),
		RefusedKind:   string(m.refusals.Kind()),
		Disk:          monitor.LayerIDs(m.rec.Disk),
		Waiting:       m.cfg.Wait && m.rec.Activation == nil,
		Linked:        m.linked != nil,
		Tracking:      m.captures.Tracking(),
		ClosedSockets: m.rec.ClosedSockets,
	}
	if isolated, ok := m.run.(machine.Isolated); ok {
		by := isolated.Isolation()
		st.IsolatedBy, st.NotIsolated = by.By, by.Missing
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

// Still is that of stall.Supervisor.
func (m *supervisor) Still() bool {
	rec := m.present()
	return rec.Phase == monitor.UserPaused || rec.Phase == monitor.Held || m.standby()
}

// halted reports whether the guest's CPUs stand still, by order or by the
// hypervisor's own doing.
func (m *supervisor) halted() bool { return m.Still() || m.stall.Why() != "" }

// awaitResumed waits until the guest's CPUs run: the order to stand still is
// taken back before they do, by the change that has the turn.
func (m *supervisor) awaitResumed(ctx context.Context) error {
	err := m.watch(ctx, func(*monitorv1.StatusResponse) (bool, error) { return !m.halted(), nil })
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
		if err == nil || machine.Ended(run) {
			return err
		}
		// Perhaps it is paused, and only the answer was lost.
		ctx, cancel := undoing(ctx)
		defer cancel()
		if undo := run.Resume(ctx); undo != nil && !machine.Ended(run) {
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
		s.m.stall.Look(ctx)
		s.m.CatchUp(ctx)
	}
	return connect.NewResponse(&monitorv1.ResumeResponse{}), wire.Encode(err)
}

func (m *supervisor) resume(ctx context.Context, run machine.Run) error {
	if m.standby() {
		return m.waits("resume")
	}
	was, still := m.present().Phase, m.Still()
	if still {
		if err := m.record(func(r *monitor.Record) { r.Phase = r.Resumed() }); err != nil {
			return err
		}
	}
	err := run.Resume(ctx)
	if err == nil || !still || machine.Ended(run) {
		return err
	}
	// Perhaps it runs, and only the answer was lost.
	ctx, cancel := undoing(ctx)
	defer cancel()
	if undo := run.Pause(ctx); undo != nil && !machine.Ended(run) {
		return errdefs.New(errdefs.OutcomeUnknown, "resume machine %s: %w, and pausing it again: %w; it may be running or paused: resume it", m.name(), err, undo)
	}
	if back := m.record(func(r *monitor.Record) { r.Phase = was }); back != nil {
		return back
	}
	return err
}

// SwitchDisk puts a new top on the disk of a run that is paused, or whose guest
// freezes its file systems meanwhile.
func (s service) SwitchDisk(ctx context.Context, req *connect.Request[monitorv1.SwitchDiskRequest]) (*connect.Response[monitorv1.SwitchDiskResponse], error) {
	top := machine.Layer{ID: req.Msg.GetLayerId(), Path: req.Msg.GetPath(), Format: "qcow2"}
	resp := &monitorv1.SwitchDiskResponse{}
	err := s.m.change(ctx, "switch disk of", func(ctx context.Context, run machine.Run) error {
		if req.Msg.GetFreeze() == nil {
			return layers.Switch(ctx, s.m, run, top)
		}
		conv, err := s.m.conversation(ctx)
		if err != nil {
			return err
		}
		return layers.SwitchAtRest(ctx, s.m, run, top, func(change func(context.Context) error) (err error) {
			resp.Thawed, resp.SwitchNano, err = conv.AtRest(ctx, req.Msg.GetFreeze(), change)
			return err
		})
	})
	return connect.NewResponse(resp), wire.Encode(err)
}

// ReplaceLayers puts a merged layer in the place of several.
func (s service) ReplaceLayers(ctx context.Context, req *connect.Request[monitorv1.ReplaceLayersRequest]) (*connect.Response[monitorv1.ReplaceLayersResponse], error) {
	merged := machine.Layer{ID: req.Msg.GetLayerId(), Path: req.Msg.GetPath(), Format: "qcow2"}
	err := s.m.change(ctx, "replace layers of", func(ctx context.Context, run machine.Run) error {
		return layers.Replace(ctx, s.m, run, req.Msg.GetFirstId(), req.Msg.GetLastId(), merged)
	})
	return connect.NewResponse(&monitorv1.ReplaceLayersResponse{}), wire.Encode(err)
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
