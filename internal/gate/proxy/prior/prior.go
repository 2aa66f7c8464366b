// Package prior asks servers whether they speak HTTP/2 without TLS, and remembers
// what they said. It sends no requests.
package prior

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

const (
	// patience is how long a server in a machine may take to answer the
	// beginning of HTTP/2. One that does not speak it may wait for more.
	patience = 5 * time.Second
	// memory is how long it is remembered whether a port speaks HTTP/2:
	// another server may have taken it since.
	memory = 30 * time.Second
)

// A frame's head in HTTP/2, and what of it a server's first one, its settings,
// looks like (RFC 9113, 3.4 and 4.1).
const (
	frameHeadBytes   = 9
	frameSettings    = 0x4
	flagAck          = 0x1
	maxSettingsBytes = 16 << 10
	settingBytes     = 6
)

// clientBegins is how a client begins: the preface, and settings without any.
const clientBegins = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + "\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// ErrNotHTTP2 means that a server did not answer HTTP/2 with HTTP/2. Nothing of
// a request was sent to it.
var ErrNotHTTP2 = errors.New("the server does not speak HTTP/2")

// Servers remembers for a while which servers speak HTTP/2, by what T names them.
type Servers[T comparable] struct {
	dial   func(ctx context.Context, server T) (net.Conn, error)
	ctx    context.Context
	end    context.CancelFunc
	asking sync.WaitGroup

	mu    sync.Mutex
	known map[T]*answer
}

// answer is what a server said, or the question for it that is under way.
type answer struct {
	asked time.Time
	done  chan struct{}
	// err is written before done is closed: nil, ErrNotHTTP2 with a reason, or
	// why it could not be asked.
	err error
}

// New returns a memory of none; dial makes the connections to ask on.
func New[T comparable](dial func(ctx context.Context, server T) (net.Conn, error)) *Servers[T] {
	ctx, end := context.WithCancel(context.Background())
	return &Servers[T]{dial: dial, ctx: ctx, end: end, known: map[T]*answer{}}
}

// Close ends questions that are under way, and waits for that.
func (s *Servers[T]) Close() {
	s.end()
	s.asking.Wait()
}

// Speaks asks the server whether it speaks HTTP/2, on a connection of its
// own, so that no request is sent to one that would misunderstand it. afresh
// asks again where the answer was no, which is ErrNotHTTP2 with a reason; any other
// error means that it could not be asked.
func (s *Servers[T]) Speaks(ctx context.Context, t T, afresh bool) error {
	s.mu.Lock()
	p := s.known[t]
	if p != nil && p.stale(afresh) {
		p = nil
	}
	if p == nil {
		p = &answer{asked: time.Now(), done: make(chan struct{})}
		s.forgetOld()
		s.known[t] = p
		// The answer is for all who wait for it, whoever of them leaves.
		s.asking.Go(func() {
			p.err = s.ask(t)
			close(p.done)
		})
	}
	s.mu.Unlock()
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stale reports whether an answer is there that does not count any more.
func (p *answer) stale(afresh bool) bool {
	select {
	case <-p.done:
	default:
		return false
	}
	if p.err != nil && (afresh || !errors.Is(p.err, ErrNotHTTP2)) {
		return true
	}
	return time.Since(p.asked) > memory
}

// forgetOld keeps the answers few.
func (s *Servers[T]) forgetOld() {
	for t, p := range s.known {
		if p.stale(false) {
			delete(s.known, t)
		}
	}
}

// Forget is called when a server that spoke HTTP/2 fails.
func (s *Servers[T]) Forget(t T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.known[t]; p != nil {
		select {
		case <-p.done:
			delete(s.known, t)
		default:
		}
	}
}

func (s *Servers[T]) ask(t T) error {
	conn, err := s.dial(s.ctx, t)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	// A connection of the agent link has one deadline for all.
	limit := time.AfterFunc(patience, func() { _ = conn.Close() })
	defer limit.Stop()
	began := time.Now()
	head := make([]byte, frameHeadBytes)
	n := 0
	if _, err = io.WriteString(conn, clientBegins); err == nil {
		n, err = io.ReadFull(conn, head)
	}
	switch {
	case err == nil && isSettings(head):
		return nil
	case n > 0:
		return fmt.Errorf("%w: it began with %q", ErrNotHTTP2, head[:n])
	case time.Since(began) >= patience:
		return fmt.Errorf("%w: it said nothing", ErrNotHTTP2)
	}
	return fmt.Errorf("%w: it ended the connection", ErrNotHTTP2)
}

func isSettings(head []byte) bool {
	length := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
	return head[3] == frameSettings && head[4]&flagAck == 0 && binary.BigEndian.Uint32(head[5:]) == 0 &&
		length%settingBytes == 0 && length <= maxSettingsBytes
}
