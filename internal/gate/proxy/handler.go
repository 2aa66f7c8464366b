package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"syscall"
)

// copyBufferBytes is the size of the buffers that response bodies go through.
// 32 to 256 KiB measure the same within noise, at ten times the speed of a
// guest's link (BenchmarkThroughput); larger ones only take memory.
const copyBufferBytes = 64 << 10

// routeKey is the context key of a request's *route.
type routeKey struct{}

// route is what a request was resolved to.
type route struct {
	host   string
	target Target
}

func routeOf(ctx context.Context) *route {
	r, _ := ctx.Value(routeKey{}).(*route)
	return r
}

// ServeHTTP carries one request to the machine its Host names.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.handlers.Add(1)
	defer p.handlers.Done()
	host := normalizeHost(r.Host)
	if r.Method == http.MethodConnect {
		p.writeProblem(w, r, connectProblem())
		return
	}
	target, err := p.backend.Lookup(r.Context(), host)
	if err != nil {
		p.writeProblem(w, r, lookupProblem(host, p.port, err))
		return
	}
	if r.ContentLength != 0 {
		// Let a response begin while the request's body is still coming.
		// It fails only for HTTP/2, which is not served here.
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			p.log.Debug("stream both ways", "host", host, "error", err)
		}
	}
	ctx := context.WithValue(r.Context(), routeKey{}, &route{host: host, target: target})
	p.reverse.ServeHTTP(w, r.WithContext(ctx))
}

func (p *Proxy) newReverse() *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:       rewrite,
		Transport:     p.upstream,
		FlushInterval: -1,
		BufferPool:    &bufferPool{},
		ErrorHandler:  p.upstreamFailed,
		ErrorLog:      slog.NewLogLogger(p.log.Handler(), slog.LevelDebug),
	}
}

// rewrite keeps the request as the client sent it, host name and query
// included; where it goes is the transport's business.
func rewrite(pr *httputil.ProxyRequest) {
	pr.Out.URL.Scheme = "http"
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery
	pr.Out.Host = pr.In.Host
	pr.SetXForwarded()
}

// upstreamFailed answers a request whose machine gave no response.
func (p *Proxy) upstreamFailed(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		// The client is gone, or the proxy closes: nobody reads an answer.
		panic(http.ErrAbortHandler)
	}
	p.writeProblem(w, r, upstreamProblem(routeOf(r.Context()), err))
}

// normalizeHost takes the port and the trailing dot from a Host header and
// makes it lower case.
func normalizeHost(hostport string) string {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

func isAddrInUse(err error) bool { return errors.Is(err, syscall.EADDRINUSE) }

// bufferPool implements httputil.BufferPool.
type bufferPool struct{ pool sync.Pool }

func (b *bufferPool) Get() []byte {
	if buf, ok := b.pool.Get().(*[copyBufferBytes]byte); ok {
		return buf[:]
	}
	return new([copyBufferBytes]byte)[:]
}

func (b *bufferPool) Put(buf []byte) {
	if len(buf) == copyBufferBytes {
		b.pool.Put((*[copyBufferBytes]byte)(buf))
	}
}
