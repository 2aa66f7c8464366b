package relay

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"

	"connectrpc.com/connect"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// The flow-control windows and frame sizes. They bound what a stream whose
// reader stands still keeps in memory, and must not be what limits a transfer.
//
//   - From the daemon: 1 MiB a stream is ample on a unix socket, and the window
//     of the connection is that of all its streams together, so that stalled
//     ones never hold up another.
//   - From the guest: the link moves 40 MB/s at best, with round trips of up to
//     80 ms mid-transfer: 4 MiB a stream; the connection's default of 1 GiB is
//     kept for the same reason as above.
//
// Frames of 1 MiB let a message of any size we send be one write.
const (
	maxStreams       = 256
	daemonStreamSize = 1 << 20
	guestStreamSize  = 4 << 20
	maxFrame         = 1 << 20
)

// ServerHTTP2 is how the monitor's socket is tuned.
func ServerHTTP2() *http.HTTP2Config {
	return &http.HTTP2Config{
		MaxConcurrentStreams:          maxStreams,
		MaxReceiveBufferPerStream:     daemonStreamSize,
		MaxReceiveBufferPerConnection: maxStreams * daemonStreamSize,
		MaxReadFrameSize:              maxFrame,
	}
}

// ClientHTTP2 is how a client of the monitor's socket is tuned.
func ClientHTTP2() *http.HTTP2Config { return linkHTTP2() }

func linkHTTP2() *http.HTTP2Config {
	return &http.HTTP2Config{MaxReceiveBufferPerStream: guestStreamSize, MaxReadFrameSize: maxFrame}
}

// Plain makes a client not ask for compressed answers: bytes are cheaper here
// than the guest's time.
func Plain() connect.ClientOption { return connect.WithAcceptCompression("gzip", nil, nil) }

// copySize is how much of an answer is moved at once, in bytes: that of the
// largest message the guest agent sends.
const copySize = 256 << 10

// proxy forwards requests for AgentService to the guest.
type proxy struct {
	find    func(context.Context) (*Conversation, error)
	errors  *connect.ErrorWriter
	buffers sync.Pool
}

// NewProxy forwards each request through the conversation that find gives for
// it. An error of find is the answer.
func NewProxy(find func(context.Context) (*Conversation, error)) http.Handler {
	return &proxy{
		find:    find,
		errors:  connect.NewErrorWriter(),
		buffers: sync.Pool{New: func() any { return new([copySize]byte) }},
	}
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	conv, err := p.find(r.Context())
	if err != nil {
		p.refuse(w, r, err)
		return
	}
	out := &http.Request{
		Method: r.Method, URL: r.URL, Header: r.Header, Body: r.Body,
		ContentLength: r.ContentLength, Host: "guest",
	}
	out.URL.Scheme, out.URL.Host = "http", "guest"
	resp, err := conv.rt.RoundTrip(out.WithContext(r.Context()))
	if err != nil {
		p.refuse(w, r, errdefs.New(errdefs.WrongState, "the link to the guest agent broke: %w; try again", err))
		return
	}
	defer resp.Body.Close()
	for k, v := range resp.Header {
		w.Header()[k] = v
	}
	w.WriteHeader(resp.StatusCode)
	if err := p.copy(w, resp); err != nil {
		panic(http.ErrAbortHandler) // the way to end a stream that has begun with an error
	}
	for k, v := range resp.Trailer {
		w.Header()[http.TrailerPrefix+k] = v
	}
}

// copy moves the answer's body and flushes each part at once.
func (p *proxy) copy(w http.ResponseWriter, resp *http.Response) error {
	buf := p.buffers.Get().(*[copySize]byte)
	defer p.buffers.Put(buf)
	flusher := http.NewResponseController(w)
	if err := flusher.Flush(); err != nil {
		return err
	}
	for {
		n, err := resp.Body.Read(buf[:])
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return err
			}
			if err := flusher.Flush(); err != nil {
				return err
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

// refuse answers in the caller's protocol. The code is always unavailable; the
// kind says more.
func (p *proxy) refuse(w http.ResponseWriter, r *http.Request, why error) {
	err := connect.NewError(connect.CodeUnavailable, errors.New(why.Error()))
	if detail, failed := connect.NewErrorDetail(wire.Info(why)); failed == nil {
		err.AddDetail(detail)
	}
	if !p.errors.IsSupported(r) {
		http.Error(w, why.Error(), http.StatusServiceUnavailable)
		return
	}
	_ = p.errors.Write(w, r, err) // the caller is gone
}
