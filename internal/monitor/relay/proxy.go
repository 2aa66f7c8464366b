package relay

import (
	"context"
	"errors"
	"io"
	"net/http"
	"path"
	"strings"
	"sync"

	"connectrpc.com/connect"
)

// The flow-control windows and frame sizes. They bound what a stream whose
// reader stands still keeps in memory, and must not be what limits a transfer.
//
//   - From the daemon: 4 MiB a stream, a few messages of an upload, and the
//     window of the connection is that of all its streams together, so that
//     stalled ones never hold up another.
//   - From the guest: 16 MiB a stream, which the link moves in the round trip of
//     80 ms that is seen mid-transfer; the connection's default of 1 GiB is kept
//     for the same reason as above.
//
// Frames of 4 MiB let a message of any size we send, or several that came
// together, be one write. Each update of a window is a write as well, and wakes
// the guest.
const (
	maxStreams       = 256
	daemonStreamSize = 4 << 20
	guestStreamSize  = 16 << 20
	maxFrame         = 4 << 20
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

// copySize is how much of an answer is moved at once, in bytes: twice the
// largest message the guest agent sends. Most answers are small, and get
// buffers of firstSize until they prove not to be.
const (
	copySize  = 4 << 20
	firstSize = 32 << 10
)

// Proxy is what a proxy is given.
type Proxy struct {
	// Find gives the conversation for a request; its error is the answer.
	Find func(context.Context) (*Conversation, error)
	// Gone says, for people, why a conversation broke in the middle of a call,
	// which is named. It may take a moment to find out.
	Gone func(ctx context.Context, conv *Conversation, call string) error
}

// proxy forwards requests for AgentService to the guest.
type proxy struct {
	Proxy
	errors       *connect.ErrorWriter
	small, large sync.Pool // of *[]byte
}

// NewProxy forwards requests to the guest agent. When the guest goes away in
// the middle of a call, the answer is an error of the code unavailable that
// says so; only an answer that was let through half way is broken off.
func NewProxy(cfg Proxy) http.Handler {
	return &proxy{
		Proxy:  cfg,
		errors: connect.NewErrorWriter(),
		small:  bufferPool(firstSize),
		large:  bufferPool(copySize),
	}
}

func bufferPool(size int) sync.Pool {
	return sync.Pool{New: func() any {
		b := make([]byte, size)
		return &b
	}}
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	conv, err := p.Find(r.Context())
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
		p.refuse(w, r, p.Gone(r.Context(), conv, path.Base(r.URL.Path)))
		return
	}
	defer resp.Body.Close()
	small := p.small.Get().(*[]byte)
	defer p.small.Put(small)
	a := &answer{p: p, conv: conv, w: w, r: r, resp: resp, buf: *small}
	defer a.release()
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "application/connect+") {
		err = a.stream()
	} else {
		err = a.single()
	}
	if err != nil {
		panic(http.ErrAbortHandler) // the way to end a stream that has begun with an error
	}
}

// answer is one on its way from the guest to the caller.
type answer struct {
	p    *proxy
	conv *Conversation
	w    http.ResponseWriter
	r    *http.Request
	resp *http.Response
	buf  []byte
	// large is what buf became when it was full.
	large *[]byte
}

// grow gives a large buffer, of which the first kept bytes are those of buf; it
// does nothing when it is large already.
func (a *answer) grow(kept int) {
	if a.large != nil {
		return
	}
	a.large = a.p.large.Get().(*[]byte)
	copy(*a.large, a.buf[:kept])
	a.buf = *a.large
}

func (a *answer) release() {
	if a.large != nil {
		a.p.large.Put(a.large)
	}
}

func (a *answer) gone() error {
	return a.p.Gone(a.r.Context(), a.conv, path.Base(a.r.URL.Path))
}

func (a *answer) begin() {
	for k, v := range a.resp.Header {
		a.w.Header()[k] = v
	}
	a.w.WriteHeader(a.resp.StatusCode)
}

func (a *answer) send(b []byte) error {
	if _, err := a.w.Write(b); err != nil {
		return err
	}
	return http.NewResponseController(a.w).Flush()
}

// single moves an answer of one message. It is begun only when it is there,
// or as much of it as fits: until then the guest's end can be told.
func (a *answer) single() error {
	n, err := io.ReadFull(a.resp.Body, a.buf)
	if err == nil {
		a.grow(n)
		var more int
		more, err = io.ReadFull(a.resp.Body, a.buf[n:])
		if n += more; errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF // of the whole, which atEnd looks at
		}
	}
	whole := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) && a.atEnd()
	if err != nil && !whole {
		a.p.refuse(a.w, a.r, a.gone())
		return nil
	}
	a.begin()
	err = a.send(a.buf[:n])
	if err == nil && !whole {
		_, err = io.CopyBuffer(struct{ io.Writer }{a.w}, struct{ io.Reader }{a.resp.Body}, a.buf)
	}
	a.trail()
	return err
}

// atEnd tells the end of a short body from one that was cut off, which is an
// unexpected end as well.
func (a *answer) atEnd() bool {
	_, err := a.resp.Body.Read(make([]byte, 1))
	return errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF)
}

func (a *answer) trail() {
	for k, v := range a.resp.Trailer {
		a.w.Header()[http.TrailerPrefix+k] = v
	}
}

// stream moves a stream of messages, each when it is whole, at once. One that
// the guest did not end itself is ended here.
func (a *answer) stream() error {
	a.begin()
	if err := a.send(nil); err != nil {
		return err
	}
	var seen envelopes
	kept := 0 // bytes of a message that is not whole, at the beginning of buf
	for {
		n, readErr := a.resp.Body.Read(a.buf[kept:])
		kept += n
		if kept == len(a.buf) {
			a.grow(kept)
		}
		if pass := seen.whole(a.buf[:kept], kept == len(a.buf)); pass > 0 {
			if err := a.send(a.buf[:pass]); err != nil {
				return err
			}
			kept = copy(a.buf, a.buf[pass:kept])
		}
		switch {
		case readErr == nil:
			continue
		case seen.ended && errors.Is(readErr, io.EOF):
			a.trail()
			return nil
		case seen.ended || seen.rest > 0 || a.r.Context().Err() != nil:
			return readErr
		}
		end, err := endWith(Unavailable(a.gone()))
		if err != nil {
			return err
		}
		return a.send(end)
	}
}

// refuse answers in the caller's protocol.
func (p *proxy) refuse(w http.ResponseWriter, r *http.Request, why error) {
	if !p.errors.IsSupported(r) {
		http.Error(w, why.Error(), http.StatusServiceUnavailable)
		return
	}
	_ = p.errors.Write(w, r, Unavailable(why)) // the caller is gone
}
