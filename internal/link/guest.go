package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// ErrHostGone is what a Port's Read returns when no host is connected; it is
// no end, a later Read waits for the next host.
var ErrHostGone = errors.New("no host is connected to the agent link")

// holdBack is how long bytes that may be the beginning of the magic wait for
// the rest of it. The host writes the magic at once, so the rest is rarely
// more than one interrupt away.
const holdBack = 5 * time.Millisecond

// Port is the guest's end of the channel: a virtio-serial port, or a socket
// that stands for one.
type Port interface {
	io.ReadWriteCloser
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
}

// Guest is the guest's side of the link, a net.Listener that yields one
// conversation after the other, each ending when the next begins. Its life:
// made on a port that it owns; Accept in a loop, by one goroutine; Close. A
// conversation that is closed here leaves the port open, what the host still
// says is discarded up to the next conversation.
type Guest struct {
	port  Port
	magic Magic

	// accept is held by Accept.
	accept sync.Mutex
	// write is held while something is written to the port.
	write sync.Mutex

	// read guards what follows; it is held while the port is read.
	read sync.Mutex
	scan *scanner
	// buf[r:w] is what was read and not yet delivered, of which buf[:s] was
	// looked at. While found, the magic's last byte is buf[s-1].
	buf     []byte
	r, s, w int
	found   bool

	// state guards what follows.
	state  sync.Mutex
	cur    *guestConn
	closed bool
	// over says why the port gives no more.
	over error
}

// NewGuest returns the guest's side of the link over port.
func NewGuest(port Port, magic Magic) *Guest {
	return &Guest{
		port: port, magic: magic,
		scan: newScanner(magic[:]),
		buf:  make([]byte, 64<<10),
	}
}

// Accept waits until the conversation before has ended and the host begins
// another. It fails with net.ErrClosed after Close, and with the port's error
// when the port has come to its end (io.EOF for a socket).
func (g *Guest) Accept() (net.Conn, error) {
	g.accept.Lock()
	defer g.accept.Unlock()
	g.state.Lock()
	cur := g.cur
	g.state.Unlock()
	if cur != nil {
		<-cur.done
	}
	g.read.Lock()
	defer g.read.Unlock()
	if err := g.alive(); err != nil {
		return nil, err
	}
	_ = g.port.SetReadDeadline(time.Time{})
	hello, err := g.awaitHello()
	if err != nil {
		return nil, g.fail(err)
	}
	c := &guestConn{g: g, done: make(chan struct{})}
	g.state.Lock()
	if g.closed {
		g.state.Unlock()
		return nil, net.ErrClosed
	}
	g.cur = c
	g.state.Unlock()
	if err := g.answer(hello); err != nil {
		c.end()
		return nil, g.fail(err)
	}
	return c, nil
}

// awaitHello discards input up to the last hello that is there.
func (g *Guest) awaitHello() ([]byte, error) {
	for {
		for !g.found {
			g.r = g.s
			if err := g.fill(); err != nil && !errors.Is(err, ErrHostGone) {
				return nil, err
			}
		}
		g.found = false
		g.r = g.s
		for g.w-g.r < nonceLen && !g.found {
			if err := g.fill(); err != nil {
				if errors.Is(err, ErrHostGone) {
					continue
				}
				return nil, err
			}
		}
		if !g.found {
			g.look()
		}
		if g.found {
			continue // the host has begun anew meanwhile
		}
		hello := append(append([]byte(nil), g.magic[:]...), g.buf[g.r:g.r+nonceLen]...)
		g.r += nonceLen
		return hello, nil
	}
}

func (g *Guest) answer(hello []byte) error {
	g.write.Lock()
	defer g.write.Unlock()
	g.state.Lock()
	if !g.closed {
		_ = g.port.SetWriteDeadline(time.Time{})
	}
	g.state.Unlock()
	_, err := g.port.Write(hello)
	return err
}

// fill reads the port once and looks for the magic in what came.
func (g *Guest) fill() error {
	if g.look(); g.found {
		return nil
	}
	switch {
	case g.r == g.w:
		g.r, g.s, g.w = 0, 0, 0
	case len(g.buf)-g.w < 4<<10:
		g.w = copy(g.buf, g.buf[g.r:g.w])
		g.s -= g.r
		g.r = 0
	}
	n, err := g.port.Read(g.buf[g.w:])
	g.w += n
	g.look()
	if n > 0 {
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}

// look scans what was not looked at, up to the first magic in it.
func (g *Guest) look() {
	if g.found || g.s == g.w {
		return
	}
	if end := g.scan.scan(g.buf[g.s:g.w]); end >= 0 {
		g.s += end
		g.found = true
		return
	}
	g.s = g.w
}

// clean is the end of what surely belongs to the current conversation.
func (g *Guest) clean() int {
	if g.found {
		return max(g.r, g.s-magicLen)
	}
	return max(g.r, g.s-g.scan.partial())
}

func (g *Guest) alive() error {
	g.state.Lock()
	defer g.state.Unlock()
	if g.closed {
		return net.ErrClosed
	}
	return g.over
}

// fail notes that the port gives no more and returns the error to tell.
func (g *Guest) fail(err error) error {
	g.state.Lock()
	defer g.state.Unlock()
	if g.closed {
		return net.ErrClosed
	}
	if g.over == nil {
		g.over = fmt.Errorf("read the agent link: %w", err)
	}
	return g.over
}

// Close ends the current conversation and closes the port.
func (g *Guest) Close() error {
	g.state.Lock()
	if g.closed {
		g.state.Unlock()
		return nil
	}
	g.closed = true
	cur := g.cur
	g.state.Unlock()
	if cur != nil {
		cur.end()
	}
	return g.port.Close()
}

// Addr names the link.
func (g *Guest) Addr() net.Addr { return addr{} }

type addr struct{}

func (addr) Network() string { return "agent-link" }
func (addr) String() string  { return "agent-link" }

// timedOut tells a deadline from an end.
func timedOut(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }
