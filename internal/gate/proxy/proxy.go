// Package proxy is the door to published routes: it takes requests of HTTP/1.1
// and HTTP/2 for *.localhost on the host's loopback, and connections to the
// loopback ports of TCP routes, and carries each to the port of the machine
// that it was published for. It is not a forward proxy, it keeps no routes and
// no machine states: a Backend looks a route up at every request, and makes the
// connections.
package proxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/accesslog"
	"github.com/holdpoint/holdpoint/internal/gate/proxy/crowd"
)

// DefaultPort is the port a Proxy listens on unless another program has it.
const DefaultPort = 7780

const (
	// portsTried are the ports from the wanted one on that are tried before
	// any free one is taken, so that the port is mostly the same after a
	// restart.
	portsTried = 10
	// headerTimeout is how long a client may take to send its headers. A
	// client on the same host needs milliseconds; a slow sender of headers
	// would otherwise keep a connection for ever.
	headerTimeout = 10 * time.Second
	// clientIdleTimeout ends keep-alive connections of clients.
	clientIdleTimeout = 2 * time.Minute
	// maxClients is how many connections of clients are served. The idle one
	// that waits longest makes place for a new one.
	maxClients = 2000
	// maxHeaderBytes bounds a request's headers. Node takes 16 KiB and nginx
	// 32 KiB by default, so no server behind the proxy sees less than it would.
	maxHeaderBytes = 128 << 10
)

// Target is where a route leads now. Two targets that differ in MachineID,
// Generation or Port never share a connection.
type Target struct {
	MachineID string
	// Generation counts the restores of the machine.
	Generation uint64
	// Port is a TCP port in the machine, reached over its loopback.
	Port int
	// Machine is the machine's name, for messages.
	Machine string
}

// Backend knows the routes and reaches the machines.
type Backend interface {
	// Lookup gives the target of a published host name, which is lower case
	// and has neither port nor trailing dot. It is asked at every request.
	// NOT_FOUND means that the name is not published. A TCP route has its
	// address on the host for a name; see machine.TCPHost.
	Lookup(ctx context.Context, host string) (Target, error)
	// Dial connects to t's port in t's machine, in t's generation and in no
	// other: a machine that has been restored since is CONFLICT. A machine
	// that does not run is WRONG_STATE, one that an operation holds
	// MACHINE_BUSY; any other error means that the port does not answer, and
	// NOT_FOUND that nothing listens there.
	// ctx bounds the call, not the connection. A connection that has a
	// CloseWrite method has it called for half closes.
	Dial(ctx context.Context, t Target) (net.Conn, error)
}

// Config is what a Proxy needs.
type Config struct {
	Backend Backend
	// Port is the port to listen on; 0 means DefaultPort.
	Port int
	// Visits gets a line of each request and connection; nil keeps none.
	Visits *accesslog.Log
	// Logger gets what no client is told; nil means slog.Default().
	Logger *slog.Logger

	// Other limits for tests.
	headerTimeout, responseTimeout time.Duration
	maxClients, maxPerMachine      int
}

// Proxy serves published routes. Its life: Start listens and serves; Cut ends
// the connections of routes that lead nowhere any more; Close ends it.
type Proxy struct {
	backend  Backend
	log      *slog.Logger
	upstream *upstream
	reverse  *httputil.ReverseProxy
	page     *template.Template
	server   *http.Server
	port     int
	clients  *crowd.Clients
	full     problem
	visits   *accesslog.Log
	tunnels  tunnels

	serving  sync.WaitGroup
	handlers sync.WaitGroup
}

// Start listens on cfg.Port of the loopback addresses, or on another free port
// when that one is taken, and serves until Close.
func Start(cfg Config) (*Proxy, error) {
	if cfg.Backend == nil {
		return nil, errors.New("start proxy: no backend")
	}
	if cfg.Port == 0 {
		cfg.Port = DefaultPort
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	cfg.maxClients = cmp.Or(cfg.maxClients, maxClients)
	cfg.headerTimeout = cmp.Or(cfg.headerTimeout, headerTimeout)
	page, err := template.New("page").Parse(pageHTML)
	if err != nil {
		return nil, fmt.Errorf("parse error page: %w", err)
	}
	listeners, err := listenLoopback(cfg.Port)
	if err != nil {
		return nil, err
	}
	p := &Proxy{
		backend:  cfg.Backend,
		log:      cfg.Logger,
		upstream: newUpstream(cfg.Backend),
		page:     page,
		port:     portOf(listeners[0]),
		clients:  crowd.NewClients(cfg.maxClients),
		full:     crowdProblem(cfg.maxClients),
		visits:   cfg.Visits,
	}
	p.tunnels = newTunnels()
	p.upstream.perMachine = cmp.Or(cfg.maxPerMachine, maxPerMachine)
	p.upstream.patience(cmp.Or(cfg.responseTimeout, responseTimeout))
	p.reverse = p.newReverse()
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	p.server = &http.Server{
		Handler:           p,
		Protocols:         protocols,
		ConnState:         p.clients.Changed,
		ReadHeaderTimeout: cfg.headerTimeout,
		IdleTimeout:       clientIdleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug),
	}
	for _, l := range listeners {
		p.serving.Go(func() { p.serve(l) })
	}
	return p, nil
}

func (p *Proxy) serve(l net.Listener) {
	if err := p.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		p.log.Error("proxy stopped listening", "address", l.Addr().String(), "error", err)
	}
}

// Addr is the IPv4 address and port that the proxy listens on.
func (p *Proxy) Addr() string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(p.port))
}

// URL is where a published host name is reached.
func (p *Proxy) URL(host string) string {
	return "http://" + net.JoinHostPort(host, strconv.Itoa(p.port)) + "/"
}

// Cut closes every connection into a machine whose target matches, in use or
// idle. It is called when a route was withdrawn or moved and when a machine
// was restored or removed; requests under way see the end of their connection.
func (p *Proxy) Cut(match func(Target) bool) { p.upstream.cut(match) }

// Close stops listening, lets requests under way end until ctx is done, then
// ends them, and returns when nothing of the proxy is left. Upgraded
// connections end at once.
func (p *Proxy) Close(ctx context.Context) error {
	p.upstream.cutUpgraded()
	p.tunnels.close()
	err := p.server.Shutdown(ctx)
	if err != nil {
		err = fmt.Errorf("close proxy with requests under way: %w", errors.Join(err, p.server.Close()))
	}
	p.upstream.close()
	p.serving.Wait()
	p.handlers.Wait()
	p.upstream.priors.Close()
	return err
}

// listenLoopback listens on 127.0.0.1 and, where the host has it, on ::1 at
// the same port: clients resolve *.localhost to both, and whoever listened on
// ::1 there would get our requests.
func listenLoopback(want int) ([]net.Listener, error) {
	var first error
	for port := want; port < want+portsTried && port <= 65535; port++ {
		ls, err := listenPort(port)
		if err == nil {
			return ls, nil
		}
		if first == nil {
			first = err
		}
	}
	for range portsTried {
		if ls, err := listenPort(0); err == nil {
			return ls, nil
		}
	}
	return nil, fmt.Errorf("listen on a loopback port from %d on: %w", want, first)
}

func listenPort(port int) ([]net.Listener, error) {
	v4, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	v6, err := net.Listen("tcp6", net.JoinHostPort("::1", strconv.Itoa(portOf(v4))))
	switch {
	case err == nil:
		return []net.Listener{v4, v6}, nil
	case isAddrInUse(err):
		return nil, errors.Join(err, v4.Close())
	}
	return []net.Listener{v4}, nil // no IPv6 on this host
}

func portOf(l net.Listener) int {
	if a, ok := l.Addr().(*net.TCPAddr); ok {
		return a.Port
	}
	return 0
}
