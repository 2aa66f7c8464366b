//go:build linux

package captures

import (
	"context"
	"time"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
)

// clockPatience is how long the end of a checkpoint waits for the correction of
// the guest's clock, two round trips of 2.5 ms usually, which went on while the
// checkpoint was written. A guest that is slower is corrected after that, for at
// most clockTimeout from the window on; what is missed then the next window's
// correction makes good.
const (
	clockPatience = 100 * time.Millisecond
	clockTimeout  = 10 * time.Second
)

// stepTimeout bounds the step by which the guest's clock is behind for certain.
const stepTimeout = 2 * time.Second

// correction is one of the guest's clock, under way or over.
type correction struct {
	cancel context.CancelFunc
	// stepped is closed when the guest has made up for the window.
	stepped, done chan struct{}
	// err is why it failed, and at when it was over, once done is closed.
	err error
	at  time.Time
}

// correct begins to correct the clock, which a window has left behind by about
// so much: QEMU stops the guest's clock with its CPUs. That is made up for at
// once, which is right however slow the guest is, and what is left is measured.
func (c *Captures) correct(behind time.Duration) {
	ctx, cancel := context.WithTimeout(c.ctx, clockTimeout)
	k := &correction{cancel: cancel, stepped: make(chan struct{}), done: make(chan struct{})}
	c.clock = k
	c.tasks.Go(func() {
		defer close(k.done)
		defer cancel()
		set := c.Supervisor.SetClock
		if behind > 0 {
			set = c.Supervisor.TuneClock
			limited, cancel := context.WithTimeout(c.ctx, stepTimeout)
			k.err = c.Supervisor.StepClock(limited, behind)
			cancel()
		}
		close(k.stepped)
		if k.err == nil {
			k.err = set(ctx)
		}
		k.at = time.Now()
		if k.err != nil && ctx.Err() == nil {
			c.Log.Warn("the guest's clock is behind after a capture", "error", k.err)
		}
	})
}

// settled ends a correction that is under way, because the guest is about to be
// stopped again.
func (c *Captures) settled() {
	if c.clock != nil {
		<-c.clock.stepped // within stepTimeout
		c.clock.cancel()
		<-c.clock.done
	}
}

// awaited waits a little for the correction after the window of the capture that
// is settled, and says how it went.
func (c *Captures) awaited(after *correction) *monitorv1.SettleCaptureResponse {
	if after == nil {
		return &monitorv1.SettleCaptureResponse{}
	}
	patience := time.NewTimer(clockPatience)
	defer patience.Stop()
	select {
	case <-after.done:
		if after.err != nil {
			return &monitorv1.SettleCaptureResponse{ClockTrouble: after.err.Error()}
		}
		return &monitorv1.SettleCaptureResponse{Returned: int64(after.at.Sub(c.begun))}
	case <-patience.C:
		return &monitorv1.SettleCaptureResponse{}
	}
}
