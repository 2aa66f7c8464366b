//go:build linux

package guest

import (
	"fmt"
	"sync"
)

// mostUnsent is how much of a console waits for its client, in bytes.
const mostUnsent = 1 << 20

// unsent is what a console has said and its client has not been sent yet. A guest
// whose console nobody takes words from stands still, so what is too much is left
// out: the log has it.
type unsent struct {
	mu     sync.Mutex
	more   sync.Cond
	text   []byte
	lost   int
	closed bool
}

func newUnsent() *unsent {
	u := &unsent{}
	u.more.L = &u.mu
	return u
}

// add never waits.
func (u *unsent) add(said []byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.text)+len(said) > mostUnsent {
		u.lost += len(said)
		return
	}
	u.tell()
	u.text = append(u.text, said...)
	u.more.Signal()
}

// tell says what was left out. The caller has u.mu.
func (u *unsent) tell() {
	if u.lost > 0 {
		u.text = fmt.Appendf(u.text, "\r\n[holdpoint: %d bytes were not shown, only logged]\r\n", u.lost)
		u.lost = 0
	}
}

// end lets take give what is left, and then nothing.
func (u *unsent) end() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.tell()
	u.closed = true
	u.more.Signal()
}

// take waits for at most so many bytes; none mean the end.
func (u *unsent) take(most int) []byte {
	u.mu.Lock()
	defer u.mu.Unlock()
	for len(u.text) == 0 && !u.closed {
		u.more.Wait()
	}
	n := min(most, len(u.text))
	piece := append([]byte(nil), u.text[:n]...)
	if u.text = u.text[n:]; len(u.text) == 0 {
		u.text = nil // of what it has grown to
	}
	return piece
}
