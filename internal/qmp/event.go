package qmp

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"
)

// Event is something that happened in QEMU.
type Event struct {
	Name string
	// Data is the event's own JSON; nil for none.
	Data json.RawMessage
	// Time is when QEMU saw it, by the host's clock.
	Time time.Time
}

// vital events decide what a machine's state is; none is ever dropped.
const (
	Shutdown      = "SHUTDOWN"
	Reset         = "RESET"
	Stop          = "STOP"
	Resume        = "RESUME"
	GuestPanicked = "GUEST_PANICKED"
)

// BlockIOError is not vital: what it means for the machine is what Stop says.
const BlockIOError = "BLOCK_IO_ERROR"

// Queue limits per subscription. When ordinary ones wait, the oldest is
// dropped; so many vital ones unread mean that nobody reads, and the
// subscription ends with an error rather than with a gap.
const (
	maxOrdinary = 256
	maxVital    = 1 << 14
)

var errUnread = errors.New("qmp: too many events unread")

// Subscription collects events for one reader. Its life: NewSubscription;
// given to Connect or Subscribe; Next until it fails; Unsubscribe. It never
// makes the client wait.
type Subscription struct {
	names []string
	// wake has one token when something changed since the last look.
	wake chan struct{}

	mu       sync.Mutex
	queue    []Event
	ordinary int
	vital    int
	dropped  int
	err      error
}

// NewSubscription collects the events of the given names, all if none is given.
func NewSubscription(names ...string) *Subscription {
	return &Subscription{names: names, wake: make(chan struct{}, 1)}
}

// Subscribe adds s; it collects what happens from now on.
func (c *Client) Subscribe(s *Subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		s.end(c.err)
		return
	}
	c.subs[s] = struct{}{}
}

// Unsubscribe removes s. What it has collected can still be read.
func (c *Client) Unsubscribe(s *Subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.subs, s)
}

// Next returns the oldest event not read yet, waiting for one if need be. When
// the client has ended and all events were read, it returns the client's error.
func (s *Subscription) Next(ctx context.Context) (Event, error) {
	for {
		if e, ok, err := s.take(); ok || err != nil {
			return e, err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return Event{}, ctx.Err()
		}
	}
}

// Dropped is how many ordinary events were dropped because nobody read them.
func (s *Subscription) Dropped() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropped
}

func (s *Subscription) take() (Event, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) == 0 {
		return Event{}, false, s.err
	}
	e := s.queue[0]
	s.queue = s.queue[1:]
	if isVital(e) {
		s.vital--
	} else {
		s.ordinary--
	}
	if len(s.queue) > 0 || s.err != nil {
		s.signal() // for a second reader
	}
	return e, true, nil
}

func (s *Subscription) add(e Event) {
	if len(s.names) > 0 && !slices.Contains(s.names, e.Name) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err != nil:
		return
	case isVital(e):
		if s.vital == maxVital {
			s.err = errUnread
			s.signal()
			return
		}
		s.vital++
	case s.ordinary == maxOrdinary:
		oldest := slices.IndexFunc(s.queue, func(e Event) bool { return !isVital(e) })
		s.queue = slices.Delete(s.queue, oldest, oldest+1)
		s.dropped++
	default:
		s.ordinary++
	}
	s.queue = append(s.queue, e)
	s.signal()
}

func (s *Subscription) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	s.signal()
}

func (s *Subscription) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func isVital(e Event) bool {
	switch e.Name {
	case Shutdown, Reset, Stop, Resume, GuestPanicked:
		return true
	}
	return false
}
