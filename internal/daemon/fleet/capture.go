//go:build linux

package fleet

import (
	"context"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// Capture takes memory, CPUs, devices and disk of one instant.
func (r *Run) Capture(ctx context.Context, req *monitorv1.CaptureRequest) (answer *monitorv1.CaptureResponse, err error) {
	err = r.call(ctx, func(c *monitor.Client) error {
		answer, err = c.Capture(ctx, req)
		return err
	})
	return answer, err
}

// SettleCapture tells what became of a capture; with resume a run that was
// kept paused goes on.
func (r *Run) SettleCapture(ctx context.Context, checkpointID string, published, resume bool) (answer *monitorv1.SettleCaptureResponse, err error) {
	err = r.call(ctx, func(c *monitor.Client) error {
		answer, err = c.SettleCapture(ctx, checkpointID, published, resume)
		return err
	})
	return answer, err
}

// SwitchAtRest gives the run a new top to write to while its guest has frozen its
// file systems.
func (r *Run) SwitchAtRest(ctx context.Context, top machine.Layer, freeze *agentv1.FreezeStart) (answer *monitorv1.SwitchDiskResponse, err error) {
	err = r.call(ctx, func(c *monitor.Client) error {
		answer, err = c.SwitchAtRest(ctx, top, freeze)
		return err
	})
	return answer, err
}

// Activate tells a run that waits whose it is, and lets it go.
func (r *Run) Activate(ctx context.Context, a monitor.Activation) error {
	err := r.call(ctx, func(c *monitor.Client) error { return c.Activate(ctx, a) })
	if err == nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.machineID = a.MachineID
	}
	return err
}

// owner is the machine whose run it is; empty for a standby.
func (r *Run) owner() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.machineID
}
