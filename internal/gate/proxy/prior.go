package proxy

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// priorPatience is how long a server in a machine may take to answer the
	// beginning of HTTP/2. One that does not speak it may wait for more.
	priorPatience = 5 * time.Second
	// priorMemory is how long it is remembered whether a port speaks HTTP/2:
	// another server may have taken it since.
	priorMemory = 30 * time.Second
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

// errNotHTTP2 means that a server did not answer HTTP/2 with HTTP/2. Nothing of
// a request was sent to it.
var errNotHTTP2 = errors.New("the server does not speak HTTP/2")

// priors remembers for a while which ports speak HTTP/2.
type priors struct {
	mu    sync.Mutex
	known map[Target]*prior
}

// prior is an answer, or the question for it that is under way.
type prior struct {
	asked time.Time
	done  chan struct{}
	// err is written before done is closed: nil, errNotHTTP2 with a reason, or
	// why it could not be asked.
	err error
}

// speaksHTTP2 asks the server whether it speaks HTTP/2, on a connection of its
// own, so that no request is sent to one that would misunderstand it. afresh
// asks again where the answer was no.
func (u *upstream) speaksHTTP2(ctx context.Context, t Target, afresh bool) error {
	u.priors.mu.Lock()
	p := u.priors.known[t]
	if p != nil && p.stale(afresh) {
		p = nil
	}
	if p == nil {
		p = &prior{asked: time.Now(), done: make(chan struct{})}
		u.priors.forgetOld()
		u.priors.known[t] = p
		// The answer is for all who wait for it, whoever of them leaves.
		u.asking.Go(func() {
			p.err = u.askPrior(t)
			close(p.done)
		})
	}
	u.priors.mu.Unlock()
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stale reports whether an answer is there that does not count any more.
func (p *prior) stale(afresh bool) bool {
	select {
	case <-p.done:
	default:
		return false
	}
	if p.err != nil && (afresh || !errors.Is(p.err, errNotHTTP2)) {
		return true
	}
	return time.Since(p.asked) > priorMemory
}

// forgetOld keeps the answers few.
func (p *priors) forgetOld() {
	for t, answer := range p.known {
		if answer.stale(false) {
			delete(p.known, t)
		}
	}
}

// forget is called when a server that spoke HTTP/2 fails.
func (p *priors) forget(t Target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if answer := p.known[t]; answer != nil {
		select {
		case <-answer.done:
			delete(p.known, t)
		default:
		}
	}
}

func (u *upstream) askPrior(t Target) error {
	conn, err := u.connect(u.ctx, t)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	// A connection of the agent link has one deadline for all.
	limit := time.AfterFunc(priorPatience, func() { _ = conn.Close() })
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
		return fmt.Errorf("%w: it began with %q", errNotHTTP2, head[:n])
	case time.Since(began) >= priorPatience:
		return fmt.Errorf("%w: it said nothing", errNotHTTP2)
	}
	return fmt.Errorf("%w: it ended the connection", errNotHTTP2)
}

func isSettings(head []byte) bool {
	length := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
	return head[3] == frameSettings && head[4]&flagAck == 0 && binary.BigEndian.Uint32(head[5:]) == 0 &&
		length%settingBytes == 0 && length <= maxSettingsBytes
}
