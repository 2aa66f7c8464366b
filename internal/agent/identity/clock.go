//go:build linux

package identity

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Clock is a guest's wall clock: the kernel's, or, where that must not be
// touched, what it would be by now.
type Clock struct {
	real bool

	mu  sync.Mutex
	off time.Duration // against the kernel's
}

// NewClock returns the kernel's clock if real, else one that begins as it.
func NewClock(real bool) *Clock { return &Clock{real: real} }

// Now is the clock's time.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.off)
}

// Set sets the clock, in nanoseconds since the Unix epoch.
func (c *Clock) Set(unixNano int64) error {
	if c.real {
		ts := unix.NsecToTimespec(unixNano)
		if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
			return fmt.Errorf("set the clock to %s: %w", time.Unix(0, unixNano).UTC().Format(time.RFC3339), err)
		}
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off = time.Until(time.Unix(0, unixNano))
	return nil
}

// Step moves the clock by d; the kernel's to the microsecond. The kernel adds
// (adjtimex(2), ADJ_SETOFFSET): between a read and a set of ours this process
// could be kept waiting, and the clock would lose that time. Its nanoseconds
// (ADJ_NANO) would change how a time daemon of the guest is understood.
func (c *Clock) Step(d time.Duration) error {
	if c.real {
		t := unix.Timex{Modes: unix.ADJ_SETOFFSET, Time: stepTime(d)}
		if _, err := unix.Adjtimex(&t); err != nil {
			return fmt.Errorf("step the clock by %s: %w", d, err)
		}
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off += d
	return nil
}

// stepTime is d as adjtimex wants it: the microseconds are never negative.
func stepTime(d time.Duration) unix.Timeval {
	us := d.Round(time.Microsecond).Microseconds()
	t := unix.Timeval{Sec: us / 1e6, Usec: us % 1e6}
	if t.Usec < 0 {
		t.Sec, t.Usec = t.Sec-1, t.Usec+1e6
	}
	return t
}
