package relay_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// clocked is a guest with a clock of its own, as far as it is ahead.
type clocked struct {
	*guest
	ahead time.Duration
	// stuck clocks cannot be moved.
	stuck bool
	// delays are those of the answers to pings, in turn.
	delays []time.Duration
	steps  int
	told   *agentv1.ContinueRequest
}

func (c *clocked) Ping(context.Context, *connect.Request[agentv1.PingRequest]) (*connect.Response[agentv1.PingResponse], error) {
	resp := connect.NewResponse(&agentv1.PingResponse{Configured: true, UnixNano: time.Now().Add(c.ahead).UnixNano()})
	if len(c.delays) > 0 {
		time.Sleep(c.delays[0])
		c.delays = append(c.delays[1:], c.delays[0])
	}
	return resp, nil
}

func (c *clocked) StepClock(_ context.Context, req *connect.Request[agentv1.StepClockRequest]) (*connect.Response[agentv1.StepClockResponse], error) {
	c.steps++
	if !c.stuck {
		c.ahead += time.Duration(req.Msg.GetDeltaNano())
	}
	return connect.NewResponse(&agentv1.StepClockResponse{}), nil
}

func (c *clocked) Continue(_ context.Context, req *connect.Request[agentv1.ContinueRequest]) (*connect.Response[agentv1.ContinueResponse], error) {
	c.told = req.Msg
	return connect.NewResponse(&agentv1.ContinueResponse{ClosedSockets: 2}), nil
}

func TestSetClock(t *testing.T) {
	const ms = time.Millisecond
	for name, test := range map[string]struct {
		guest clocked
		// at most so far ahead or behind afterwards, by so many steps
		within time.Duration
		steps  int
		fails  bool
		tune   bool
	}{
		"right":        {within: 0, steps: 0},
		"nearly":       {guest: clocked{ahead: 4 * ms}, within: 4 * ms, steps: 0},
		"behind":       {guest: clocked{ahead: -300 * ms}, within: 0, steps: 1},
		"an hour fast": {guest: clocked{ahead: time.Hour}, within: 0, steps: 1},
		"slow once":    {guest: clocked{ahead: -300 * ms, delays: []time.Duration{900 * ms, 2 * ms, 2 * ms, 2 * ms, 2 * ms}}, within: 2 * ms, steps: 1},
		"slow":         {guest: clocked{ahead: -300 * ms, delays: []time.Duration{100 * ms}}, within: 80 * ms, steps: 1},
		"too slow":     {guest: clocked{delays: []time.Duration{time.Second}}, within: 0, fails: true},
		"tuned":        {guest: clocked{ahead: -300 * ms}, within: 0, steps: 1, tune: true},
		"set":          {guest: clocked{ahead: -time.Hour}, within: time.Hour, tune: true},
		"set, slow":    {guest: clocked{ahead: time.Hour, delays: []time.Duration{900 * ms}}, within: time.Hour, tune: true},
		"stuck":        {guest: clocked{ahead: time.Minute, stuck: true}, within: time.Minute, steps: 39, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := test.guest
				c.guest = newGuestOf(t, func(g *guest) handler { c.guest = g; return &c })
				conv := converse(t, c.guest)
				defer conv.Close()
				set := conv.SetClock
				if test.tune {
					set = conv.TuneClock
				}
				err := set(context.Background())
				if (err != nil) != test.fails || test.fails && !errdefs.Is(err, errdefs.Deadline) {
					t.Error(err)
				}
				if c.ahead.Abs() > test.within || c.steps != test.steps {
					t.Errorf("%s ahead after %d steps", c.ahead, c.steps)
				}
			})
		})
	}
}

func TestContinue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &clocked{ahead: -time.Hour}
		c.guest = newGuestOf(t, func(g *guest) handler { c.guest = g; return c })
		conv := converse(t, c.guest)
		defer conv.Close()
		sockets, err := conv.Continue(context.Background(), "child", "5a")
		if err != nil || sockets != 2 || c.ahead != 0 {
			t.Errorf("%d sockets, %s ahead, %v", sockets, c.ahead, err)
		}
		if c.told.GetHostname() != "child" || c.told.GetMachineId() != "5a" || len(c.told.GetEntropy()) != 64 || c.told.GetUnixNano() == 0 {
			t.Errorf("told %v", c.told)
		}
	})
}

// TestCloseOutside: the guest is told nothing but to do so.
func TestCloseOutside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &clocked{ahead: -time.Hour}
		c.guest = newGuestOf(t, func(g *guest) handler { c.guest = g; return c })
		conv := converse(t, c.guest)
		defer conv.Close()
		if sockets, err := conv.CloseOutside(context.Background()); err != nil || sockets != 2 || c.ahead != -time.Hour {
			t.Errorf("%d sockets, %s ahead, %v", sockets, c.ahead, err)
		}
		if c.told.GetHostname() != "" || c.told.GetMachineId() != "" || c.told.GetUnixNano() != 0 {
			t.Errorf("told %v", c.told)
		}
	})
}
