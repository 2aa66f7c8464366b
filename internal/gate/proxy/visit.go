package proxy

import (
	"bufio"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/holdpoint/holdpoint/internal/accesslog"
)

// visit is one request's answer, counted for the route's log.
type visit struct {
	http.ResponseWriter
	began  time.Time
	status int
	sent   atomic.Int64
	// note is what the proxy itself answered.
	note string
}

// Unwrap is for http.ResponseController.
func (v *visit) Unwrap() http.ResponseWriter { return v.ResponseWriter }

// WriteHeader notes the final status.
func (v *visit) WriteHeader(status int) {
	if v.status == 0 && status >= http.StatusOK {
		v.status = status
	}
	v.ResponseWriter.WriteHeader(status)
}

// Write counts.
func (v *visit) Write(b []byte) (int, error) {
	if v.status == 0 {
		v.status = http.StatusOK
	}
	n, err := v.ResponseWriter.Write(b)
	v.sent.Add(int64(n))
	return n, err
}

// Hijack counts what an upgraded connection carries, its head included.
func (v *visit) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(v.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	v.status = http.StatusSwitchingProtocols
	return &hijacked{Conn: conn, sent: &v.sent}, rw, nil
}

// hijacked is an upgraded connection.
type hijacked struct {
	net.Conn
	sent *atomic.Int64
}

// Write counts.
func (h *hijacked) Write(b []byte) (int, error) {
	n, err := h.Conn.Write(b)
	h.sent.Add(int64(n))
	return n, err
}

// CloseWrite ends the half towards the client.
func (h *hijacked) CloseWrite() error {
	if half, ok := h.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return h.Close()
}

// logVisit writes the line of a request that has ended.
func (p *Proxy) logVisit(v *visit, r *http.Request, rt *route, whole bool) {
	note := v.note
	if !whole && note == "" {
		note = "cut off"
	}
	p.logEntry(rt, accesslog.Entry{
		At: v.began, Client: r.RemoteAddr, Method: r.Method, Path: r.URL.EscapedPath(), Query: r.URL.RawQuery != "",
		Protocol: r.Proto, Status: v.status, Sent: v.sent.Load(), Took: time.Since(v.began), Note: note,
	})
}

func (p *Proxy) logEntry(rt *route, e accesslog.Entry) {
	if err := p.visits.Add(rt.target.MachineID, rt.host, e); err != nil {
		p.log.Debug("log what came through a route", "host", rt.host, "error", err)
	}
}
