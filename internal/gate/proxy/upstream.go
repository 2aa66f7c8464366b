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
	// maxResponseHeaderBytes bounds what a guest can make the host hold.
	maxResponseHeaderBytes = 1 << 20
	// ioBufferBytes are the buffers of a connection into a machine.
	ioBufferBytes = 16 << 10
)

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

	mu    sync.Mutex
	conns map[*trackedConn]struct{}
}

func newUpstream(b Backend) *upstream {
	u := &upstream{backend: b, conns: make(map[*trackedConn]struct{})}
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
	return u
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
	return u.try(r, &route{host: rt.host, target: now})
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
		out.Body = io.NopCloser(r.Body)
	}
	url := *r.URL
	// The transport pools connections by this address; nothing resolves it.
	url.Host = poolKey(rt.target)
	out.URL = &url
	transport := u.fresh
	if replayable(r) {
		transport = u.pooled
	}
	resp, err := transport.RoundTrip(out)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusSwitchingProtocols && used != nil {
		used.upgraded.Store(true)
	}
	return resp, nil
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
	rt := routeOf(ctx)
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := u.backend.Dial(ctx, rt.target)
	if err != nil {
		return nil, &dialError{target: rt.target, err: err}
	}
	c := &trackedConn{Conn: conn, target: rt.target, owner: u}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.conns == nil {
		return nil, errors.Join(errors.New("proxy closes"), conn.Close())
	}
	u.conns[c] = struct{}{}
	return c, nil
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
	u.pooled.CloseIdleConnections()
	u.fresh.CloseIdleConnections()
}

func (u *upstream) forget(c *trackedConn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.conns, c)
}

// trackedConn is a connection into a machine that Cut can find.
type trackedConn struct {
	net.Conn
	target   Target
	owner    *upstream
	upgraded atomic.Bool
}

// Close closes the connection and forgets it.
func (c *trackedConn) Close() error {
	c.owner.forget(c)
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
