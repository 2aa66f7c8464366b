//go:build linux

package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// DialPort connects to a port in a machine, through its gate and its agent;
// a machine that was restored since generation is CONFLICT. ctx bounds the
// call, not the connection.
func (s *Service) DialPort(ctx context.Context, machineID string, generation uint64, port int) (net.Conn, error) {
	m, err := s.cfg.Catalog.GetMachine(ctx, machineID)
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("connect to port %d", port)
	door, run, err := s.enterMachine(ctx, m, hold.Request{Generation: generation, Door: hold.Dial, What: what})
	if err != nil {
		return nil, err
	}
	// The connection outlives ctx, but must not outlive the generation.
	alive, cancel := expelling(context.Background(), door)
	end := func() {
		cancel()
		door.Done()
	}
	stop := context.AfterFunc(ctx, cancel)
	conn, err := dialGuest(alive, run, port, end)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		end()
		return nil, wire.Decode(s.outcome(alive, effect{door: door, run: run, what: what}, err))
	}
	return conn, nil
}

// guestConn is one connection to a port in a machine, carried by a stream.
type guestConn struct {
	stream *connect.BidiStreamForClient[agentv1.DialRequest, agentv1.DialResponse]
	port   int
	end    func()
	rest   []byte
	// ended: the port has sent its last byte, and may still be written to.
	ended bool

	write    sync.Mutex
	deadline *time.Timer
	closed   sync.Once
}

func dialGuest(ctx context.Context, run *fleet.Run, port int, end func()) (net.Conn, error) {
	stream := run.Agent().Dial(ctx)
	err := stream.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_Port{Port: uint32(port)}, HalfClose: true})
	if err == nil || errors.Is(err, io.EOF) {
		_, err = stream.Receive()
	}
	if err != nil {
		_ = stream.CloseResponse() // it has ended
		return nil, wire.Decode(err)
	}
	return &guestConn{stream: stream, port: port, end: end}, nil
}

// Read gives what the port sent.
func (c *guestConn) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		if c.ended {
			return 0, io.EOF
		}
		message, err := c.stream.Receive()
		if err != nil {
			if errors.Is(err, io.EOF) { // Connect wraps it
				return 0, io.EOF
			}
			return 0, wire.Decode(err)
		}
		if message.GetEnd() != nil {
			c.ended = true
		}
		c.rest = message.GetData()
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// Write sends to the port.
func (c *guestConn) Write(p []byte) (int, error) {
	c.write.Lock()
	defer c.write.Unlock()
	if err := c.stream.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_Data{Data: p}}); err != nil {
		return 0, fmt.Errorf("write to port %d of the guest: %w", c.port, err)
	}
	return len(p), nil
}

// CloseWrite tells the port that no more follows.
func (c *guestConn) CloseWrite() error {
	c.write.Lock()
	defer c.write.Unlock()
	return c.stream.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_End{End: &agentv1.DialEnd{}}})
}

// Close ends the connection.
func (c *guestConn) Close() error {
	c.closed.Do(func() {
		_ = c.SetDeadline(time.Time{}) // always nil
		c.end()
		_ = c.stream.CloseRequest()  // the stream's context has ended it
		_ = c.stream.CloseResponse() // likewise
	})
	return nil
}

// SetDeadline ends the connection at t; what was begun by then fails.
func (c *guestConn) SetDeadline(t time.Time) error {
	c.write.Lock()
	defer c.write.Unlock()
	if c.deadline != nil {
		c.deadline.Stop()
		c.deadline = nil
	}
	if !t.IsZero() {
		c.deadline = time.AfterFunc(time.Until(t), c.end)
	}
	return nil
}

// SetReadDeadline is SetDeadline.
func (c *guestConn) SetReadDeadline(t time.Time) error { return c.SetDeadline(t) }

// SetWriteDeadline is SetDeadline.
func (c *guestConn) SetWriteDeadline(t time.Time) error { return c.SetDeadline(t) }

// LocalAddr is the host's side.
func (c *guestConn) LocalAddr() net.Addr {
	return guestAddr("host " + fmt.Sprint(os.Getpid()))
}

// RemoteAddr is the port in the guest.
func (c *guestConn) RemoteAddr() net.Addr { return guestAddr(fmt.Sprintf("guest port %d", c.port)) }

type guestAddr string

func (a guestAddr) Network() string { return "agent-link" }
func (a guestAddr) String() string  { return string(a) }
