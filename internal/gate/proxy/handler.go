package proxy

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"syscall"
	"time"
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
	// body is the client's, of a request of HTTP/2.
	body io.Closer
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
	if p.clients.Full() {
		w.Header().Set("Connection", "close")
		p.writeProblem(w, r, p.full)
		return
	}
	target, err := p.backend.Lookup(r.Context(), host)
	if err != nil {
		p.writeProblem(w, r, lookupProblem(host, p.port, err))
		return
	}
	if r.ContentLength != 0 && r.ProtoMajor == 1 { // HTTP/2 does so anyway
		// Let a response begin while the request's body is still coming.
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			p.log.Debug("stream both ways", "host", host, "error", err)
		}
	}
	if strings.EqualFold(r.Header.Get("Upgrade"), "h2c") {
		// It is for the connection to here only, and whoever wants HTTP/2 has
		// begun with it: what comes then would pass nobody who looks up routes.
		r.Header.Del("Upgrade")
		r.Header.Del("Http2-Settings")
	}
	rt := &route{host: host, target: target}
	if r.ProtoMajor == 2 {
		rt.body = r.Body
	}
	v, whole := &visit{ResponseWriter: w, began: time.Now()}, false
	defer func() { p.logVisit(v, r, rt, whole) }()
	p.reverse.ServeHTTP(v, r.WithContext(context.WithValue(r.Context(), routeKey{}, rt)))
	whole = true
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
// included; where it goes is the transport's business. Who the client is, the
// machine is told by this proxy alone: it is the first one, and what a program
// on this host says of proxies before it is not believed.
func rewrite(pr *httputil.ProxyRequest) {
	pr.Out.URL.Scheme = "http"
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery
	pr.Out.Host = pr.In.Host
	// The same map: it is filled when the body has come.
	pr.Out.Trailer = pr.In.Trailer
	maps.DeleteFunc(pr.Out.Header, func(name string, _ []string) bool {
		return tellsClient(name)
	})
	pr.SetXForwarded()
	if forwarded := forwardedBy(pr.In); forwarded != "" {
		pr.Out.Header.Set("Forwarded", forwarded)
	}
}

// tellsClient reports whether a server may read the header as one in which a
// proxy says who the client is. CGI, WSGI and their like take all that is
// neither letter nor digit in a name for the same sign (RFC 3875, 4.1.18).
func tellsClient(name string) bool {
	name = strings.Map(func(r rune) rune {
		switch {
		case 'A' <= r && r <= 'Z':
			return r - 'A' + 'a'
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9':
			return r
		}
		return '-'
	}, name)
	return strings.HasPrefix(name, "x-forwarded-") || name == "x-real-ip" || name == "forwarded"
}

// forwardedBy is the Forwarded header (RFC 7239) of a request.
func forwardedBy(r *http.Request) string {
	address, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return ""
	}
	if strings.Contains(address, ":") {
		address = `"[` + address + `]"`
	}
	host := strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(r.Host)
	return "for=" + address + `;host="` + host + `";proto=http`
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
