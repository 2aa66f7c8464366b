package wire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// frameHead is the size of what precedes each message of a stream of the
// Connect protocol: one byte of flags, four of length, big endian
// ("Streaming-RPCs", connectrpc.com/docs/protocol).
const frameHead = 5

// maxFrame bounds a message that is passed by as it is, in bytes; it is the
// same as that of one that is not.
const maxFrame = 8 << 20

type framesKey struct{}

// WithFrames makes a call through FrameTransport, whose answer is a stream,
// pass its messages to take: each whole and with what precedes it, as it came.
// It must not be kept. Connect sees a stream without messages, and its end; take
// is called while that is waited for. An error of take ends the stream.
//
// Files are passed on so. To Connect each of their messages would be one to
// allocate, and to copy five times.
func WithFrames(ctx context.Context, take func(frame []byte) error) context.Context {
	return context.WithValue(ctx, framesKey{}, take)
}

// FrameTransport is next, for calls with WithFrames and all others.
func FrameTransport(next http.RoundTripper) http.RoundTripper { return frameTransport{next} }

type frameTransport struct{ next http.RoundTripper }

func (t frameTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := t.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	take, _ := r.Context().Value(framesKey{}).(func([]byte) error)
	if take != nil && res.StatusCode == http.StatusOK && strings.HasPrefix(res.Header.Get("Content-Type"), "application/connect+") {
		res.Body = &frameBody{ReadCloser: res.Body, take: take}
	}
	return res, nil
}

// frameBody is the body of an answer without its messages.
type frameBody struct {
	io.ReadCloser
	take func(frame []byte) error
	buf  []byte
	// rest is what was read and is Connect's; done says that all else is, too.
	rest []byte
	done bool
}

// Read gives what is no message.
func (b *frameBody) Read(p []byte) (int, error) {
	for !b.done {
		if err := b.next(); err != nil {
			return 0, err
		}
	}
	if len(b.rest) > 0 {
		n := copy(p, b.rest)
		b.rest = b.rest[n:]
		return n, nil
	}
	return b.ReadCloser.Read(p)
}

// next passes one message by. One with flags ends the stream.
func (b *frameBody) next() error {
	b.grow(frameHead)
	if _, err := io.ReadFull(b.ReadCloser, b.buf[:frameHead]); err != nil {
		return err
	}
	if b.buf[0] != 0 {
		b.done, b.rest = true, b.buf[:frameHead]
		return nil
	}
	size := binary.BigEndian.Uint32(b.buf[1:])
	if size > maxFrame {
		return errdefs.New(errdefs.Invalid, "a message of %d bytes: at most %d are passed on", size, maxFrame)
	}
	end := frameHead + int(size)
	b.grow(end)
	if _, err := io.ReadFull(b.ReadCloser, b.buf[frameHead:end]); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("read a message: %w", err)
	}
	return b.take(b.buf[:end])
}

// grow makes buf have size bytes, keeping a head that is there.
func (b *frameBody) grow(size int) {
	if len(b.buf) >= size {
		return
	}
	grown := make([]byte, max(size, 4<<10))
	copy(grown, b.buf[:min(len(b.buf), frameHead)])
	b.buf = grown
}

type writerKey struct{}

// KeepWriter lets a handler of Connect's write frames, by SendFrame.
func KeepWriter(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Content-Type") == "application/connect+proto" {
			r = r.WithContext(context.WithValue(r.Context(), writerKey{}, w))
		}
		next.ServeHTTP(w, r)
	})
}

// SendFrame is how the handler of a call sends a frame of the kind that
// WithFrames gives, instead of a message. It is nil where that is not possible:
// outside KeepWriter, and where the caller speaks another protocol.
func SendFrame(ctx context.Context) func(frame []byte) error {
	w, ok := ctx.Value(writerKey{}).(http.ResponseWriter)
	if !ok {
		return nil
	}
	return func(frame []byte) error {
		if _, err := w.Write(frame); err != nil {
			return fmt.Errorf("pass on a message: %w", err)
		}
		return http.NewResponseController(w).Flush()
	}
}
