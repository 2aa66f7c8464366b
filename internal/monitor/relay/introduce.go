package relay

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// introduceTimeout bounds the calls that tell a guest who it is, after the
// handshake. A guest that was just continued under TCG has to translate all
// its code again.
const introduceTimeout = 60 * time.Second

// entropySize is how much fresh entropy a guest gets, in bytes: twice what its
// kernel's generator holds.
const entropySize = 64

// Configure tells a guest that was booted since it was last told who it is;
// the clock and entropy are added to what is told.
func (c *Conversation) Configure(ctx context.Context, told *agentv1.ConfigureRequest) error {
	ctx, cancel := context.WithTimeout(ctx, introduceTimeout)
	defer cancel()
	pong, err := c.agent.Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
	if err != nil {
		return fmt.Errorf("ping guest agent: %w", err)
	}
	if pong.Msg.GetConfigured() {
		return nil
	}
	told = proto.CloneOf(told)
	told.UnixNano, told.Entropy = time.Now().UnixNano(), entropy()
	if _, err = c.agent.Configure(ctx, connect.NewRequest(told)); err != nil {
		return fmt.Errorf("configure guest: %w", err)
	}
	return nil
}

// Continue tells a guest that goes on from a checkpoint who it is now, and sets
// its clock. It returns once the guest has acknowledged both, and how many
// sockets to the outside the guest gave up.
func (c *Conversation) Continue(ctx context.Context, hostname, machineID string) (closedSockets uint32, err error) {
	ctx, cancel := context.WithTimeout(ctx, introduceTimeout)
	defer cancel()
	resp, err := c.agent.Continue(ctx, connect.NewRequest(&agentv1.ContinueRequest{
		Hostname: hostname, MachineId: machineID, UnixNano: time.Now().UnixNano(), Entropy: entropy(),
	}))
	if err != nil {
		return 0, fmt.Errorf("continue guest: %w", err)
	}
	return resp.Msg.GetClosedSockets(), c.SetClock(ctx)
}

// CloseOutside makes a guest give up its sockets to the outside, which the
// outside does not know any more, and returns how many those were.
func (c *Conversation) CloseOutside(ctx context.Context) (closedSockets uint32, err error) {
	ctx, cancel := context.WithTimeout(ctx, introduceTimeout)
	defer cancel()
	// Told nothing new, it only does what follows from going on.
	resp, err := c.agent.Continue(ctx, connect.NewRequest(&agentv1.ContinueRequest{Entropy: entropy()}))
	if err != nil {
		return 0, fmt.Errorf("close the guest's sockets to the outside: %w", err)
	}
	return resp.Msg.GetClosedSockets(), nil
}

func entropy() []byte {
	b := make([]byte, entropySize)
	rand.Read(b) // never fails: crypto/rand ends the process instead
	return b
}

// The bounds of SetClock. Half of a ping's round trip is how far the clock that
// it tells may be off: 1.2 ms usually, and 100 ms at the first ping of a guest
// that was continued under TCG, or on a host with too much to do.
const (
	// clockGoal is how exactly the difference of the clocks is to be known.
	clockGoal = 20 * time.Millisecond
	// clockMost is what is taken when clockTries were not enough: the promise
	// is that the clock is right within 100 ms. After mostTries it is given up.
	clockMost  = 80 * time.Millisecond
	clockTries = 5
	mostTries  = 40
	// clockFine is not worth a step.
	clockFine = 5 * time.Millisecond
	// clockOwn is more than a guest's clock can be off by itself.
	clockOwn = 10 * time.Second
)

// SetClock moves the guest's wall clock until it is the host's. A guest that is
// slow to answer is asked repeatedly: each ping bounds the difference, and all
// of them together do so better. One caller at a time.
func (c *Conversation) SetClock(ctx context.Context) error { return c.setClock(ctx, false) }

// TuneClock is SetClock for a guest that went on all the time, but for moments
// that were made up for: a clock that is far off was set so in the guest, and
// stays.
func (c *Conversation) TuneClock(ctx context.Context) error { return c.setClock(ctx, true) }

func (c *Conversation) setClock(ctx context.Context, tune bool) error {
	var known difference
	for try := 1; ; try++ {
		began := time.Now()
		pong, err := c.agent.Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
		if err != nil {
			return fmt.Errorf("ask the guest for its clock: %w", err)
		}
		half := time.Since(began) / 2
		known.narrow(time.Unix(0, pong.Msg.GetUnixNano()).Sub(began.Add(half)), half)
		offset, doubt := known.middle()
		slow, wrong := doubt > clockGoal, offset.Abs() > doubt
		switch {
		case !slow && offset.Abs() <= clockFine, tune && offset.Abs() > clockOwn+doubt:
			return nil
		case slow && try >= clockTries && offset.Abs()+doubt <= clockMost:
			return nil
		case try >= mostTries:
			return errdefs.New(errdefs.Deadline, "set the guest's clock: it is %s off, give or take %s, after %d tries", offset.Round(time.Millisecond), doubt.Round(time.Millisecond), try)
		case slow && !wrong && (try < clockTries || doubt > clockMost):
			continue // it may well be right
		}
		if err := c.StepClock(ctx, -offset); err != nil {
			return err
		}
		known.move(-offset)
	}
}

// StepClock moves the guest's wall clock by a difference that is known.
func (c *Conversation) StepClock(ctx context.Context, by time.Duration) error {
	if _, err := c.agent.StepClock(ctx, connect.NewRequest(&agentv1.StepClockRequest{DeltaNano: int64(by)})); err != nil {
		return fmt.Errorf("set the guest's clock: %w", err)
	}
	return nil
}

// difference is what is known of how far one clock is ahead of another: from
// least to most.
type difference struct {
	least, most time.Duration
	some        bool
}

// narrow adds that it is offset, give or take doubt. What contradicts what was
// known replaces it.
func (d *difference) narrow(offset, doubt time.Duration) {
	least, most := offset-doubt, offset+doubt
	if d.some && max(d.least, least) <= min(d.most, most) {
		least, most = max(d.least, least), min(d.most, most)
	}
	*d = difference{least: least, most: most, some: true}
}

func (d *difference) move(by time.Duration) { d.least, d.most = d.least+by, d.most+by }

func (d *difference) middle() (offset, doubt time.Duration) {
	return (d.least + d.most) / 2, (d.most - d.least) / 2
}
