//go:build linux

package monitor

import (
	"context"

	"connectrpc.com/connect"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
)

// Capture takes the memory, devices and disk of one instant. The same request
// may be repeated, after ErrGone too: a capture whose monitor died before the
// window had closed is CONFLICT then if its layer may be in use already, and is
// begun anew otherwise. After an error the layer belongs to the chain if
// Status.Disk names it, in use or empty, and to nobody if not.
// MACHINE_BUSY: another capture is not settled; DEADLINE: the guest
// changes its memory faster than it can be copied; OUTCOME_UNKNOWN: the
// hypervisor did not say in time whether the guest runs, and it is let go as
// soon as it answers.
func (c *Client) Capture(ctx context.Context, req *monitorv1.CaptureRequest) (*monitorv1.CaptureResponse, error) {
	resp, err := c.monitor.Capture(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, c.decode(ctx, err)
	}
	return resp.Msg, nil
}

// SettleCapture says what became of the capture, and with resume lets a run go
// that it has kept paused. The staging folder is the caller's from then on. It
// may be repeated, and is allowed for captures that the monitor does not know.
// It waits 100 ms at most for the correction of the guest's clock.
func (c *Client) SettleCapture(ctx context.Context, checkpointID string, published, resume bool) (*monitorv1.SettleCaptureResponse, error) {
	resp, err := c.monitor.SettleCapture(ctx, connect.NewRequest(&monitorv1.SettleCaptureRequest{
		CheckpointId: checkpointID, Published: published, Resume: resume,
	}))
	if err == nil {
		return resp.Msg, nil
	}
	_, err = c.exit(ctx, err) // what has ended needs no word any more
	return &monitorv1.SettleCaptureResponse{}, err
}

// Activate tells a run of a Config with Wait whose it is, and lets it go. It
// may be repeated with the same content; other content is CONFLICT, a run that
// never waited WRONG_STATE.
func (c *Client) Activate(ctx context.Context, a Activation) error {
	_, err := c.monitor.Activate(ctx, connect.NewRequest(&monitorv1.ActivateRequest{
		MachineId: a.MachineID, MachineName: a.MachineName,
		Hostname: a.Guest.Hostname, GuestMachineId: a.Guest.MachineID, OnBoot: a.Guest.OnBoot, Tmpfs: a.Guest.Tmpfs,
		Kernel: a.Kernel, Initramfs: a.Initramfs, Cmdline: a.Cmdline, Defaults: a.Guest.Defaults.Message(),
	}))
	return c.decode(ctx, err)
}

// Network tells what the machine's network has refused since its monitor began;
// WRONG_STATE for a machine without one.
func (c *Client) Network(ctx context.Context) (*monitorv1.NetworkResponse, error) {
	resp, err := c.monitor.Network(ctx, connect.NewRequest(&monitorv1.NetworkRequest{}))
	if err != nil {
		return nil, c.decode(ctx, err)
	}
	return resp.Msg, nil
}
