//go:build linux

package process

import (
	"context"
	"reflect"

	"connectrpc.com/connect"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// Capture goes on when its caller is gone only once the window is open.
func (s service) Capture(ctx context.Context, req *connect.Request[monitorv1.CaptureRequest]) (*connect.Response[monitorv1.CaptureResponse], error) {
	if s.m.standby() {
		return nil, wire.Encode(s.m.waits("capture"))
	}
	answer, err := s.m.captures.Capture(ctx, req.Msg)
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(answer), nil
}

// SettleCapture is allowed for captures that are not known.
func (s service) SettleCapture(ctx context.Context, req *connect.Request[monitorv1.SettleCaptureRequest]) (*connect.Response[monitorv1.SettleCaptureResponse], error) {
	answer, err := s.m.captures.Settle(ctx, req.Msg.GetCheckpointId(), req.Msg.GetPublished(), req.Msg.GetResume())
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(answer), nil
}

// Activate is recorded first: a successor completes it.
func (s service) Activate(ctx context.Context, req *connect.Request[monitorv1.ActivateRequest]) (*connect.Response[monitorv1.ActivateResponse], error) {
	told := &monitor.Activation{
		MachineID: req.Msg.GetMachineId(), MachineName: req.Msg.GetMachineName(),
		Guest: monitor.Guest{
			Hostname: req.Msg.GetHostname(), MachineID: req.Msg.GetGuestMachineId(),
			OnBoot: req.Msg.GetOnBoot(), Tmpfs: req.Msg.GetTmpfs(), Defaults: defaults.Of(req.Msg.GetDefaults()),
		},
		Kernel: req.Msg.GetKernel(), Initramfs: req.Msg.GetInitramfs(), Cmdline: req.Msg.GetCmdline(),
	}
	err := s.m.change(ctx, "activate", func(ctx context.Context, run machine.Run) error { return s.m.activate(ctx, run, told) })
	return connect.NewResponse(&monitorv1.ActivateResponse{}), wire.Encode(err)
}

func (s service) Network(context.Context, *connect.Request[monitorv1.NetworkRequest]) (*connect.Response[monitorv1.NetworkResponse], error) {
	answer, err := s.m.outlet.Refused()
	return connect.NewResponse(answer), wire.Encode(err)
}

func (m *supervisor) activate(ctx context.Context, run machine.Run, told *monitor.Activation) error {
	now := m.present().Activation
	switch {
	case !m.cfg.Wait:
		return errdefs.New(errdefs.WrongState, "activate machine %s: its run was begun for it and does not wait", m.name())
	case now != nil && !reflect.DeepEqual(now, told):
		return errdefs.New(errdefs.Conflict, "activate machine %s: its run was given to machine %s already", told.MachineName, now.MachineName)
	case told.MachineID == "":
		return errdefs.New(errdefs.Invalid, "activate run %s: a machine is needed", m.cfg.Run.RunID)
	}
	if told.Cmdline != "" {
		if _, err := link.MagicIn(told.Cmdline); err != nil {
			return err
		}
	}
	if now == nil {
		err := m.record(func(r *monitor.Record) { r.Activation, r.MachineID = told, told.MachineID })
		if err != nil {
			return err
		}
	}
	if m.Still() {
		return nil // a user has paused it since
	}
	return run.Resume(ctx)
}
