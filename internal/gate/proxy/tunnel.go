package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/holdpoint/holdpoint/internal/accesslog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// retryPause is when a port that another program had is tried again.
const retryPause = 2 * time.Second

// acceptPause is how long accepting rests when the host has no descriptor left.
const acceptPause = 100 * time.Millisecond

// tunnels are the TCP routes: the ports of the host that are listened on, and
// what they carry.
type tunnels struct {
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	closed bool
	doors  map[int]*tcpDoor
	// problems say why a port that a route has is not listened on.
	problems map[int]error
	// clients are the connections, with the port that each came to.
	clients map[*net.TCPConn]int
	retry   *time.Timer
}

// tcpDoor is one port of the host. It is kept while a route has it, or while
// it is reserved for one to be.
type tcpDoor struct {
	listeners []net.Listener
	reserved  bool
}

func newTunnels() tunnels {
	ctx, cancel := context.WithCancel(context.Background())
	return tunnels{
		ctx: ctx, cancel: cancel, doors: map[int]*tcpDoor{},
		problems: map[int]error{}, clients: map[*net.TCPConn]int{},
	}
}

// Reserve listens on a port of the host for a TCP route to be, which has to be
// there when release is called. CONFLICT is a port that another program has,
// DENIED one that it takes privileges to listen on.
func (p *Proxy) Reserve(port int) (release func(), err error) {
	t := &p.tunnels
	t.mu.Lock()
	defer t.mu.Unlock()
	door := t.doors[port]
	if door != nil && door.reserved {
		return nil, errdefs.New(errdefs.Conflict, "listen on %s: it is being given to another route; choose another port with --listen", machine.TCPHost(port))
	}
	if door == nil {
		if door, err = p.listenTCP(port); err != nil {
			return nil, err
		}
	}
	door.reserved = true
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		door.reserved = false
	}, nil
}

// Settle listens on the ports that TCP routes have, and on no others.
func (p *Proxy) Settle(ports map[int]bool) {
	t := &p.tunnels
	t.mu.Lock()
	defer t.mu.Unlock()
	for port, door := range t.doors {
		if !ports[port] && !door.reserved {
			door.close()
			delete(t.doors, port)
			t.cut(port)
		}
	}
	p.listenAll(ports)
}

// listenAll listens on the ports that are not listened on yet. It is called with
// the tunnels locked, and calls itself again as long as it cannot.
func (p *Proxy) listenAll(ports map[int]bool) {
	t := &p.tunnels
	if t.retry != nil {
		t.retry.Stop()
	}
	if t.closed {
		return
	}
	problems := map[int]error{}
	for port := range ports {
		if t.doors[port] != nil {
			continue
		}
		if _, err := p.listenTCP(port); err != nil {
			problems[port] = err
			if t.problems[port] == nil {
				p.log.Warn("a TCP route is not served", "error", err)
			}
		}
	}
	t.problems = problems
	if len(problems) > 0 {
		t.retry = time.AfterFunc(retryPause, func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			again := map[int]bool{}
			for port := range t.problems {
				again[port] = true
			}
			p.listenAll(again)
		})
	}
}

// cut ends what came to a port.
func (t *tunnels) cut(port int) {
	for c, at := range t.clients {
		if at == port {
			reset(c)
		}
	}
}

// Problem is why the port of a TCP route is not listened on; nil while it is.
func (p *Proxy) Problem(port int) error {
	p.tunnels.mu.Lock()
	defer p.tunnels.mu.Unlock()
	return p.tunnels.problems[port]
}

// listenTCP is called with the tunnels locked.
func (p *Proxy) listenTCP(port int) (*tcpDoor, error) {
	t := &p.tunnels
	if t.closed {
		return nil, errdefs.New(errdefs.WrongState, "listen on %s: the daemon is stopping", machine.TCPHost(port))
	}
	listeners, err := listenPort(port)
	switch {
	case isAddrInUse(err):
		return nil, errdefs.New(errdefs.Conflict, "listen on %s: another program has this port of the host; end that program, or choose another port with --listen", machine.TCPHost(port))
	case errors.Is(err, syscall.EACCES):
		return nil, errdefs.New(errdefs.Denied, "listen on %s: this user may not; choose a port from 1024 on with --listen", machine.TCPHost(port))
	case err != nil:
		return nil, fmt.Errorf("listen on %s: %w", machine.TCPHost(port), err)
	}
	door := &tcpDoor{listeners: listeners}
	t.doors[port] = door
	for _, l := range listeners {
		p.serving.Go(func() { p.acceptTCP(l, port) })
	}
	return door, nil
}

func (d *tcpDoor) close() {
	for _, l := range d.listeners {
		_ = l.Close() // nothing is lost
	}
}

func (p *Proxy) acceptTCP(l net.Listener, port int) {
	host := machine.TCPHost(port)
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			p.log.Warn("accept a connection of a TCP route", "route", host, "error", err)
			select {
			case <-time.After(acceptPause):
			case <-p.tunnels.ctx.Done():
			}
			continue
		}
		client := c.(*net.TCPConn)
		if !p.tunnels.admit(client, port) {
			return
		}
		p.handlers.Go(func() {
			defer p.tunnels.leave(client)
			p.carryTCP(client, host)
		})
	}
}

// admit keeps a client's connection, so that close can end it.
func (t *tunnels) admit(c *net.TCPConn, port int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		reset(c)
		return false
	}
	t.clients[c] = port
	return true
}

func (t *tunnels) leave(c *net.TCPConn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.clients, c)
}

// close ends it all.
func (t *tunnels) close() {
	t.cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	if t.retry != nil {
		t.retry.Stop()
	}
	for _, door := range t.doors {
		door.close()
	}
	for c := range t.clients {
		reset(c)
	}
}

// reset ends a connection so that its peer sees an error and no end.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0) // it is closed in any case
	_ = c.Close()
}

// carryTCP carries one connection of a TCP route.
func (p *Proxy) carryTCP(client *net.TCPConn, host string) {
	began := time.Now()
	ctx := p.tunnels.ctx
	target, err := p.backend.Lookup(ctx, host)
	if err != nil { // it was withdrawn just now
		reset(client)
		return
	}
	rt := &route{host: host, target: target}
	into, err := p.upstream.connect(ctx, target)
	if errdefs.Is(err, errdefs.Conflict) { // restored just now
		if now, lookupErr := p.backend.Lookup(ctx, host); lookupErr == nil && now != target {
			rt.target = now
			into, err = p.upstream.connect(ctx, now)
		}
	}
	var in, out int64
	note := ""
	if err != nil {
		reset(client)
		note = upstreamProblem(rt, err).Title
	} else if in, out, err = join(client, into); err != nil {
		note = "cut off"
	}
	if err != nil {
		p.log.Debug("carry a connection of a TCP route", "route", host, "error", err)
	}
	p.logEntry(rt, accesslog.Entry{
		At: began, Client: client.RemoteAddr().String(), Received: in, Sent: out, Took: time.Since(began), Note: note,
	})
}

// join carries bytes both ways, and each side's end of what it says, until both
// have ended. An error of one side ends both at once.
func join(client *net.TCPConn, into *trackedConn) (in, out int64, err error) {
	var (
		once   sync.Once
		broken error
	)
	fail := func(err error) {
		if err != nil {
			once.Do(func() {
				broken = err
				reset(client)
				_ = into.Close() // it is over
			})
		}
	}
	var both sync.WaitGroup
	both.Go(func() {
		n, err := io.Copy(into, client)
		in = n
		if err == nil {
			_ = into.CloseWrite() // who reads from there learns what is wrong
		}
		fail(err)
	})
	both.Go(func() {
		n, err := io.Copy(client, into)
		out = n
		if err == nil {
			_ = client.CloseWrite() // likewise
		}
		fail(err)
	})
	both.Wait()
	_ = into.Close()
	_ = client.Close()
	return in, out, broken
}
