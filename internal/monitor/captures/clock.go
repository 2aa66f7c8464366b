//go:build linux

package captures

import (
	"context"
	"time"
)

// clockPatience is how long a checkpoint waits for the correction of the
// guest's clock, three round trips of 2.5 ms usually. A guest that is slower is
// corrected while the checkpoint is written, for at most clockTimeout; what is
// missed then the next window's correction makes good.
const (
	clockPatience = 100 * time.Millisecond
	clockTimeout  = 10 * time.Second
)

// correction is one of the guest's clock, under way or over.
type correction struct {
	cancel context.CancelFunc
	done   chan struct{}
	// err is why it failed, once done is closed.
	err error
}

// correct begins to correct the clock.
func (c *Captures) correct() *correction {
	ctx, cancel := context.WithTimeout(c.ctx, clockTimeout)
	k := &correction{cancel: cancel, done: make(chan struct{})}
	c.clock = k
	c.tasks.Go(func() {
		defer close(k.done)
		defer cancel()
		if k.err = c.Supervisor.SetClock(ctx); k.err != nil {
			c.Log.Warn("the guest's clock is behind after a capture", "error", k.err)
		}
	})
	return k
}

// settled ends a correction that is under way: the guest is about to be stopped
// again.
func (c *Captures) settled() {
	if c.clock != nil {
		c.clock.cancel()
		<-c.clock.done
	}
}

// trouble waits a little for the correction, and says why it failed.
func (k *correction) trouble() string {
	patience := time.NewTimer(clockPatience)
	defer patience.Stop()
	select {
	case <-k.done:
		if k.err != nil {
			return k.err.Error()
		}
	case <-patience.C:
	}
	return ""
}
