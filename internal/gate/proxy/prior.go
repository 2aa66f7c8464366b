package proxy

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
	// priorPatience is how long a server in a machine may take to answer the
	// beginning of HTTP/2. One that does not speak it may wait for more.
	priorPatience = 5 * time.Second
	// plainMemory is how long a port is known to speak only HTTP/1: another
	// server may have taken it since.
	plainMemory = 30 * time.Second
)

// A frame's head in HTTP/2 and what of it a server's first one, its settings,
// looks like (RFC 9113, 3.4 and 4.1).
const (
	frameHeadBytes   = 9
	frameSettings    = 0x4
	flagAck          = 0x1
	maxSettingsBytes = 16 << 10
	settingBytes     = 6
)

// errNotHTTP2 means that a server did not answer HTTP/2 with HTTP/2. Nothing of
// a request was sent to it.
var errNotHTTP2 = errors.New("the server does not speak HTTP/2")

// priorConn is a connection on which HTTP/2 is begun without knowing whether the
// server speaks it. Only the beginning goes out, which says nothing of any
// request; all else waits until the server has sent its settings. So a request
// may go elsewhere when there are none.
type priorConn struct {
	net.Conn
	limit *time.Timer

	// begun is only used by the writer, which HTTP/2 has one of at a time.
	begun bool
	// head and refused are written before answered is closed.
	head     []byte
	refused  error
	answered chan struct{}
	once     sync.Once
}

func newPriorConn(c net.Conn) *priorConn {
	p := &priorConn{Conn: c, answered: make(chan struct{})}
	p.limit = time.AfterFunc(priorPatience, func() { p.settle(nil, fmt.Errorf("%w: it said nothing", errNotHTTP2)) })
	return p
}

// settle decides, once, whether the server speaks HTTP/2.
func (p *priorConn) settle(head []byte, refused error) {
	p.once.Do(func() {
		p.limit.Stop()
		p.head, p.refused = head, refused
		close(p.answered)
		if refused != nil {
			_ = p.Conn.Close() // so that who reads gets to know
		}
	})
}

// Write sends the client's beginning at once, and all else when the server has
// answered.
func (p *priorConn) Write(b []byte) (int, error) {
	if p.begun {
		<-p.answered
		if p.refused != nil {
			return 0, p.refused
		}
	}
	p.begun = true
	return p.Conn.Write(b)
}

// Read looks at the first frame before it gives it.
func (p *priorConn) Read(b []byte) (int, error) {
	select {
	case <-p.answered:
	default:
		p.look()
	}
	<-p.answered
	if p.refused != nil {
		return 0, p.refused
	}
	if len(p.head) > 0 {
		n := copy(b, p.head)
		p.head = p.head[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}

// look reads the head of the server's first frame.
func (p *priorConn) look() {
	head := make([]byte, frameHeadBytes)
	n, err := io.ReadFull(p.Conn, head)
	switch {
	case err != nil && n == 0:
		p.settle(nil, fmt.Errorf("%w: it ended the connection", errNotHTTP2))
	case err != nil || !isSettings(head):
		p.settle(nil, fmt.Errorf("%w: it began with %q", errNotHTTP2, head[:n]))
	default:
		p.settle(head, nil)
	}
}

func isSettings(head []byte) bool {
	length := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
	return head[3] == frameSettings && head[4]&flagAck == 0 && binary.BigEndian.Uint32(head[5:]) == 0 &&
		length%settingBytes == 0 && length <= maxSettingsBytes
}

// Close also ends what waits for the server.
func (p *priorConn) Close() error {
	p.settle(nil, fmt.Errorf("%w: the connection was closed", errNotHTTP2))
	return p.Conn.Close()
}

// dialPrior is how the transport of HTTP/2 connects.
func (u *upstream) dialPrior(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := u.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return newPriorConn(c), nil
}

// plainPorts remembers for a while which ports speak only HTTP/1.
type plainPorts struct {
	mu    sync.Mutex
	until map[Target]time.Time
}

func (p *plainPorts) has(t Target) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Now().Before(p.until[t])
}

func (p *plainPorts) add(t Target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for other, until := range p.until {
		if now.After(until) {
			delete(p.until, other)
		}
	}
	p.until[t] = now.Add(plainMemory)
}
