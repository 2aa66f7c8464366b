//go:build linux

package guest

import (
	"context"
	"net"
	"path/filepath"
	"sync"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

type consoleStream = connect.BidiStream[holdpointv1.GuestExecRequest, holdpointv1.GuestExecResponse]

const (
	// consoleChunk is the largest piece of a console sent at once, in bytes.
	consoleChunk = 32 << 10
	// rebootPatience is how long the console of a run that goes on may be away: a
	// reboot of the guest is a new process behind it.
	rebootPatience = 15 * time.Second
	rebootLook     = 100 * time.Millisecond
)

// Console carries the machine's serial console. What is typed passes the gate.
func (s *Service) Console(ctx context.Context, stream *consoleStream) error {
	first, err := stream.Receive()
	if err != nil {
		return wire.Encode(errdefs.New(errdefs.Invalid, "console: no machine was named: %w", err))
	}
	door, run, err := s.enter(ctx, first.GetMachine(), hold.Request{
		Generation: first.GetGeneration(), Door: hold.Console, What: "console",
		Waiting: func(why string) { _ = stream.Send(&holdpointv1.GuestExecResponse{Waiting: why}) }, // a gone client is seen below
	})
	if err != nil {
		return wire.Encode(err)
	}
	defer door.Done()
	leave, err := s.sitDown(door.Machine(), first.GetMachine())
	if err != nil {
		return wire.Encode(err)
	}
	defer leave()
	ctx, cancel := expelling(ctx, door)
	defer cancel()
	c := &console{stream: stream, door: door, path: filepath.Join(s.cfg.Home.RunSockets(run.ID), machine.ConsoleSocket)}
	err = c.carry(ctx, run)
	if err != nil {
		return s.outcome(ctx, effect{door: door, run: run, what: "console"}, err)
	}
	return stream.Send(&holdpointv1.GuestExecResponse{Message: &agentv1.ExecResponse{
		Message: &agentv1.ExecResponse_Exit{Exit: &agentv1.ExecExit{}},
	}})
}

// sitDown takes the one place at a machine's console, until leave is called.
func (s *Service) sitDown(machineID, name string) (leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.consoles[machineID] {
		return nil, errdefs.New(errdefs.MachineBusy, "console of machine %s: somebody is at it already, and there is one place; see what it says with holdpoint logs --follow %s", name, name)
	}
	s.consoles[machineID] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.consoles, machineID)
	}, nil
}

// console is one client at one console.
type console struct {
	stream *consoleStream
	door   *hold.Admission
	path   string
	// typed is what is to be said at the console, and unsaid what of that the last
	// connection has not taken.
	typed  chan []byte
	unsaid []byte
}

// carry carries both ways until the run has ended, which is no error, or ctx.
func (c *console) carry(ctx context.Context, run *fleet.Run) error {
	conn, err := c.dial(ctx, run)
	if err != nil {
		return err
	}
	c.typed = make(chan []byte)
	go c.receive(ctx) // it ends with the client's stream, which ends when this call does
	started := &agentv1.ExecResponse{Message: &agentv1.ExecResponse_Started{Started: &agentv1.ExecStarted{}}}
	if err := c.stream.Send(&holdpointv1.GuestExecResponse{Message: started}); err != nil {
		_ = conn.Close() // nobody is there
		return err
	}
	for conn != nil {
		if err := c.show(ctx, conn); err != nil {
			return err
		}
		if conn, err = c.dial(ctx, run); err != nil {
			return err
		}
	}
	return nil
}

// dial connects to the console; nil when the run has ended.
func (c *console) dial(ctx context.Context, run *fleet.Run) (net.Conn, error) {
	look := time.NewTicker(rebootLook)
	defer look.Stop()
	for limit := time.Now().Add(rebootPatience); ; {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", c.path)
		switch {
		case err == nil:
			return conn, nil
		case run.Ended():
			return nil, nil
		case time.Now().After(limit):
			return nil, errdefs.New(errdefs.Unsupported, "console: the run has none (%w); one that began with an older holdpoint gets it when the machine is started again", err)
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// receive gives what the client types, past the gate.
func (c *console) receive(ctx context.Context) {
	for {
		message, err := c.stream.Receive()
		if err != nil || c.door.Pass(ctx) != nil {
			return
		}
		select {
		case c.typed <- message.GetMessage().GetStdin():
		case <-ctx.Done():
			return
		}
	}
}

// show carries both ways until the connection ends, which is no error.
func (c *console) show(ctx context.Context, conn net.Conn) error {
	ended, out := make(chan struct{}), newUnsent()
	var others sync.WaitGroup
	others.Go(func() { c.say(conn, ended) })
	var sent error
	others.Go(func() { sent = c.send(conn, out) })
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	buffer := make([]byte, consoleChunk)
	for {
		n, err := conn.Read(buffer)
		out.add(buffer[:n])
		if err != nil {
			break
		}
	}
	close(ended)
	_ = conn.Close() // ends a write, too
	out.end()
	others.Wait()
	if sent != nil {
		return sent
	}
	return context.Cause(ctx)
}

// send sends what the console says to the client until its end; a client that is
// gone ends the connection.
func (c *console) send(conn net.Conn, out *unsent) error {
	for piece := out.take(consoleChunk); len(piece) > 0; piece = out.take(consoleChunk) {
		message := &agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stdout{Stdout: piece}}
		if err := c.stream.Send(&holdpointv1.GuestExecResponse{Message: message}); err != nil {
			_ = conn.Close()
			return err
		}
	}
	return nil
}

// say types at the connection until that has ended.
func (c *console) say(conn net.Conn, ended <-chan struct{}) {
	for {
		if len(c.unsaid) > 0 {
			n, err := conn.Write(c.unsaid)
			if c.unsaid = c.unsaid[n:]; err != nil {
				return // the reader learns why
			}
		}
		select {
		case c.unsaid = <-c.typed:
		case <-ended:
			return
		}
	}
}
