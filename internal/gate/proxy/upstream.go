package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/gate/proxy/crowd"
	"github.com/holdpoint/holdpoint/internal/gate/proxy/prior"
)

const (
	// dialTimeout bounds one Dial. It is long because a backend may hold a
	// connection back while a checkpoint of the machine is under way.
	dialTimeout = 60 * time.Second
	// idleTimeout ends keep-alive connections into machines. It is below the
	// five seconds of Node's http server, the shortest default of the usual
	// servers, so that a server seldom closes a connection just as it is used.
	idleTimeout = 4 * time.Second
	// maxIdle bounds idle connections into machines: each is a stream of its
	// machine's agent link.
	maxIdle        = 128
	maxIdlePerPort = 64
	// maxPerMachine bounds connections into one machine, which its agent link
	// carries besides all commands and copies: of its 1,000 streams about half.
	maxPerMachine = 512
	// responseTimeout is how long a server in a machine may take from the end of
	// a request to the head of its answer. What agents build may compile first,
	// or ask a model; a page that takes longer wants to send something meanwhile.
	// HTTP/2 has none: calls of gRPC have deadlines of their own, and one that
	// waits for an event may be silent for days.
	responseTimeout = 10 * time.Minute
	// maxResponseHeaderBytes bounds what a guest can make the host hold.
	maxResponseHeaderBytes = 1 << 20
	// ioBufferBytes are the buffers of a connection into a machine.
	ioBufferBytes = 16 << 10
)

// errFull means that a machine has as many connections as it may.
var errFull = errors.New("too many connections into the machine")

// dialError is a failed Backend.Dial; nothing was sent to the machine.
type dialError struct {
	target Target
	err    error
}

func (e *dialError) Error() string {
	return fmt.Sprintf("connect to port %d of machine %q: %v", e.target.Port, e.target.Machine, e.err)
}

func (e *dialError) Unwrap() error { return e.err }

// upstream is the side towards the machines: it keeps the connections, each
// bound to the machine id, generation and port it was made for.
type upstream struct {
	backend Backend
	// pooled keeps connections for the next request; fresh makes one for
	// each request that could not be sent again if the machine's server
	// closed an idle connection at the very moment of its reuse.
	pooled, fresh *http.Transport
	// prior speaks HTTP/2 with prior knowledge, which is in priors.
	prior  *http.Transport
	priors *prior.Servers[Target]
	seats  *crowd.Seats
	// perMachine is maxPerMachine, but in tests.
	perMachine int

	mu    sync.Mutex
	conns map[*trackedConn]struct{}
}

func newUpstream(b Backend) *upstream {
	u := &upstream{
		backend: b, conns: make(map[*trackedConn]struct{}), perMachine: maxPerMachine,
		seats: crowd.NewSeats(),
	}
	u.priors = prior.New(func(ctx context.Context, t Target) (net.Conn, error) { return u.connect(ctx, t) })
	u.pooled = &http.Transport{
		DialContext:            u.dial,
		DisableCompression:     true,
		MaxIdleConns:           maxIdle,
		MaxIdleConnsPerHost:    maxIdlePerPort,
		IdleConnTimeout:        idleTimeout,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: maxResponseHeaderBytes,
		ReadBufferSize:         ioBufferBytes,
		WriteBufferSize:        ioBufferBytes,
	}
	u.fresh = u.pooled.Clone()
	u.fresh.DisableKeepAlives = true
	u.prior = u.pooled.Clone()
	u.prior.Protocols = new(http.Protocols)
	u.prior.Protocols.SetUnencryptedHTTP2(true)
	return u
}

// patientBody is a request's body that is still there after an attempt that did
// not come to read it.
type patientBody struct {
	io.Reader
	// in is the client's, of HTTP/2, where to close it ends a read. A transport
	// that was cut off waits for that. nil of HTTP/1, where a read ends with the
	// connection that it is for.
	in   io.Closer
	read atomic.Bool
}

// Read notes that it was.
func (b *patientBody) Read(p []byte) (int, error) {
	b.read.Store(true)
	return b.Reader.Read(p)
}

// Close ends a read.
func (b *patientBody) Close() error {
	if b.in != nil && b.read.Load() {
		return b.in.Close()
	}
	return nil
}

// patience is how long a server may take to answer over HTTP/1.
func (u *upstream) patience(d time.Duration) {
	u.pooled.ResponseHeaderTimeout, u.fresh.ResponseHeaderTimeout = d, d
}

// RoundTrip sends r to its route's target. When the target has moved on
// between the look-up and the connection, as in a restore, the request goes to
// where the route leads now: nothing of it was sent yet.
func (u *upstream) RoundTrip(r *http.Request) (*http.Response, error) {
	rt := routeOf(r.Context())
	resp, err := u.try(r, rt)
	if !errdefs.Is(err, errdefs.Conflict) {
		return resp, err
	}
	now, lookupErr := u.backend.Lookup(r.Context(), rt.host)
	if lookupErr != nil || now == rt.target {
		return nil, err
	}
	return u.try(r, &route{host: rt.host, target: now, body: rt.body})
}

func (u *upstream) try(r *http.Request, rt *route) (*http.Response, error) {
	ctx := context.WithValue(r.Context(), routeKey{}, rt)
	var used *trackedConn
	if r.Header.Get("Upgrade") != "" {
		ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
			used, _ = info.Conn.(*trackedConn)
		}})
	}
	out := r.WithContext(ctx)
	if r.Body != nil {
		// A transport closes the body when it finds no connection; the
		// reverse proxy closes it in the end.
		out.Body = &patientBody{Reader: r.Body, in: rt.body}
	}
	url := *r.URL
	// The transport pools connections by this address; nothing resolves it.
	url.Host = poolKey(rt.target)
	out.URL = &url
	resp, err := u.send(out, rt.target)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusSwitchingProtocols && used != nil {
		used.upgraded.Store(true)
	}
	return resp, nil
}

// send speaks HTTP/2 to the machine where the client does, unless the server
// there does not; then it is HTTP/1, which no call of gRPC can use.
func (u *upstream) send(r *http.Request, t Target) (*http.Response, error) {
	if r.ProtoMajor == 2 {
		err := u.priors.Speaks(r.Context(), t, isGRPC(r))
		if err == nil {
			resp, err := u.prior.RoundTrip(r)
			if err != nil && r.Context().Err() == nil {
				u.priors.Forget(t)
			}
			return resp, err
		}
		if !errors.Is(err, prior.ErrNotHTTP2) || isGRPC(r) {
			return nil, err
		}
	}
	if replayable(r) {
		return u.pooled.RoundTrip(r)
	}
	return u.fresh.RoundTrip(r)
}

// poolKey is different for any two targets that must not share a connection.
func poolKey(t Target) string {
	return net.JoinHostPort(t.MachineID+"."+strconv.FormatUint(t.Generation, 10), strconv.Itoa(t.Port))
}

// replayable says whether the transport may send r again by itself.
func replayable(r *http.Request) bool {
	if r.Body != nil && r.Body != http.NoBody {
		return false
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}

// dial is called by the transports, with the values of the context of the
// request that first wanted the connection.
func (u *upstream) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	return u.connect(ctx, routeOf(ctx).target)
}

func (u *upstream) connect(ctx context.Context, t Target) (_ *trackedConn, err error) {
	if !u.seat(t) {
		return nil, &dialError{target: t, err: errFull}
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := u.backend.Dial(ctx, t)
	if err != nil {
		u.seats.Leave(t.MachineID)
		return nil, &dialError{target: t, err: err}
	}
	c := &trackedConn{Conn: conn, target: t, owner: u}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.conns == nil {
		u.seats.Leave(t.MachineID)
		return nil, errors.Join(errors.New("proxy closes"), conn.Close())
	}
	u.conns[c] = struct{}{}
	return c, nil
}

// seat takes a place in the machine, if need be that of a connection that only
// waits for the next request.
func (u *upstream) seat(t Target) bool {
	if u.seats.Take(t.MachineID, u.perMachine) {
		return true
	}
	u.closeIdle()
	return u.seats.Take(t.MachineID, u.perMachine)
}

func (u *upstream) closeIdle() {
	for _, t := range []*http.Transport{u.pooled, u.fresh, u.prior} {
		t.CloseIdleConnections()
	}
}

func (u *upstream) cut(match func(Target) bool) {
	u.closeWhere(func(c *trackedConn) bool { return match(c.target) })
}

func (u *upstream) cutUpgraded() {
	u.closeWhere(func(c *trackedConn) bool { return c.upgraded.Load() })
}

func (u *upstream) closeWhere(match func(*trackedConn) bool) {
	u.mu.Lock()
	var matched []*trackedConn
	for c := range u.conns {
		if match(c) {
			matched = append(matched, c)
		}
	}
	u.mu.Unlock()
	for _, c := range matched {
		_ = c.Close() // whoever uses it sees the error
	}
}

// close ends every connection and refuses new ones.
func (u *upstream) close() {
	u.mu.Lock()
	conns := u.conns
	u.conns = nil
	u.mu.Unlock()
	for c := range conns {
		_ = c.Close()
	}
	u.closeIdle()
}

// trackedConn is a connection into a machine that Cut can find.
type trackedConn struct {
	net.Conn
	target   Target
	owner    *upstream
	upgraded atomic.Bool
	left     sync.Once
}

// Close closes the connection and forgets it.
func (c *trackedConn) Close() error {
	c.left.Do(func() {
		c.owner.seats.Leave(c.target.MachineID)
		c.owner.mu.Lock()
		defer c.owner.mu.Unlock()
		delete(c.owner.conns, c)
	})
	return c.Conn.Close()
}

// CloseWrite tells the machine that no more comes; a connection that cannot is
// closed in both directions.
func (c *trackedConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}
