package link

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// past is a deadline that ends what waits.
func past() time.Time { return time.Unix(1, 0) }

// guestConn is one conversation at the guest. Read and Write may be called at
// the same time, each by one goroutine.
type guestConn struct {
	g    *Guest
	done chan struct{} // closed when the conversation has ended
	once sync.Once

	// mu guards the port's deadlines against being moved after the end.
	mu           sync.Mutex
	ended        bool
	readDeadline time.Time
}

// Read returns io.EOF when the host has begun another conversation or gone.
func (c *guestConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	g := c.g
	g.read.Lock()
	defer g.read.Unlock()
	for {
		if c.isEnded() {
			return 0, io.EOF
		}
		if end := g.clean(); g.r < end {
			n := Copy(p, g.buf[g.r:end])
			g.r += n
			return n, nil
		}
		if g.found {
			c.end()
			return 0, io.EOF
		}
		held := g.w - g.r
		err := c.fill(held > 0)
		switch {
		case err == nil:
		case held > 0 && timedOut(err) && !c.readExpired():
			n := copy(p, g.buf[g.r:g.w])
			g.r += n
			return n, nil
		case timedOut(err) && !c.isEnded():
			return 0, os.ErrDeadlineExceeded
		default:
			if !errors.Is(err, ErrHostGone) && !c.isEnded() {
				_ = g.fail(err)
			}
			c.end()
			return 0, io.EOF
		}
	}
}

// fill reads the port, for at most holdBack when bytes are held back.
func (c *guestConn) fill(held bool) error {
	if !held {
		return c.g.fill()
	}
	c.moveReadDeadline(time.Now().Add(holdBack))
	err := c.g.fill()
	c.moveReadDeadline(time.Time{})
	return err
}

// moveReadDeadline sets the port's deadline to the earlier of t and the one
// that was set from outside.
func (c *guestConn) moveReadDeadline(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	if d := c.readDeadline; !d.IsZero() && (t.IsZero() || d.Before(t)) {
		t = d
	}
	_ = c.g.port.SetReadDeadline(t)
}

func (c *guestConn) readExpired() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.readDeadline.IsZero() && !time.Now().Before(c.readDeadline)
}

// Write fails with net.ErrClosed when the conversation has ended.
func (c *guestConn) Write(p []byte) (int, error) {
	c.g.write.Lock()
	defer c.g.write.Unlock()
	if c.isEnded() {
		return 0, net.ErrClosed
	}
	n, err := c.g.port.Write(p)
	if err != nil && c.isEnded() {
		err = net.ErrClosed
	}
	return n, err
}

// end ends the conversation and whatever waits in it.
func (c *guestConn) end() {
	c.once.Do(func() {
		c.mu.Lock()
		c.ended = true
		_ = c.g.port.SetReadDeadline(past())
		_ = c.g.port.SetWriteDeadline(past())
		c.mu.Unlock()
		close(c.done)
	})
}

func (c *guestConn) isEnded() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// Close ends the conversation; the port stays open.
func (c *guestConn) Close() error {
	c.end()
	return nil
}

// SetDeadline is that of net.Conn.
func (c *guestConn) SetDeadline(t time.Time) error {
	_ = c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

// SetReadDeadline is that of net.Conn.
func (c *guestConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return net.ErrClosed
	}
	c.readDeadline = t
	return c.g.port.SetReadDeadline(t)
}

// SetWriteDeadline is that of net.Conn.
func (c *guestConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return net.ErrClosed
	}
	return c.g.port.SetWriteDeadline(t)
}

// LocalAddr names the link.
func (c *guestConn) LocalAddr() net.Addr { return addr{} }

// RemoteAddr names the link.
func (c *guestConn) RemoteAddr() net.Addr { return addr{} }
