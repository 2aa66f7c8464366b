//go:build linux

package monitor

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

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

func serverHTTP2() *http.HTTP2Config {
	return &http.HTTP2Config{
		MaxConcurrentStreams:          maxStreams,
		MaxReceiveBufferPerStream:     daemonStreamSize,
		MaxReceiveBufferPerConnection: maxStreams * daemonStreamSize,
		MaxReadFrameSize:              maxFrame,
	}
}

func linkHTTP2() *http.HTTP2Config {
	return &http.HTTP2Config{MaxReceiveBufferPerStream: guestStreamSize, MaxReadFrameSize: maxFrame}
}

// plain makes a client not ask for compressed answers: bytes are cheaper here
// than the guest's time.
func plain() connect.ClientOption { return connect.WithAcceptCompression("gzip", nil, nil) }

// relinkPatience is how long a request waits for a link that broke or that a
// successor is just making: a handshake takes 5 to 81 ms.
const relinkPatience = 5 * time.Second

// copySize is how much of an answer is moved at once, in bytes: that of the
// largest message the guest agent sends.
const copySize = 256 << 10

// proxy forwards requests for AgentService to the guest.
type proxy struct {
	m       *monitor
	errors  *connect.ErrorWriter
	buffers sync.Pool
}

func newProxy(m *monitor) *proxy {
	return &proxy{
		m:       m,
		errors:  connect.NewErrorWriter(),
		buffers: sync.Pool{New: func() any { return new([copySize]byte) }},
	}
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	conv, err := p.m.conversation(r.Context())
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

// conversation is the one to send a request through. A guest that has been
// ready before is waited for a moment; the errors are of kind WRONG_STATE and
// say why there is none.
func (m *monitor) conversation(ctx context.Context) (*conversation, error) {
	patience := time.NewTimer(relinkPatience)
	defer patience.Stop()
	for {
		m.mu.Lock()
		conv, rec, trouble, changed := m.link, m.rec, m.trouble, m.changed
		m.mu.Unlock()
		if conv != nil && rec.Phase != UserPaused {
			return conv, nil
		}
		if err := unreachable(rec, trouble); err != nil {
			return nil, err
		}
		select {
		case <-changed:
		case <-patience.C:
			if trouble == "" {
				trouble = "the guest agent does not answer"
			}
			return nil, errdefs.New(errdefs.WrongState, "machine %s: %s; try again or look at its console with holdpoint logs", rec.MachineID, trouble)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// unreachable says why no link is to be expected soon; nil if one is.
func unreachable(rec Record, trouble string) error {
	switch {
	case rec.Phase == Exited:
		return errdefs.New(errdefs.WrongState, "machine %s: its run has ended; start it first", rec.MachineID)
	case rec.Phase == UserPaused:
		return errdefs.New(errdefs.WrongState, "machine %s is paused; resume it first", rec.MachineID)
	case rec.ReadyUnixNano == 0 && trouble != "":
		return errdefs.New(errdefs.WrongState, "machine %s: its guest is not ready: %s", rec.MachineID, trouble)
	case rec.ReadyUnixNano == 0:
		return errdefs.New(errdefs.WrongState, "machine %s: its guest is still booting; try again once it is ready", rec.MachineID)
	}
	return nil
}
