//go:build linux

package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// bulkCall is the HTTP side of a call. Files are moved through it, below
// Connect's messages but in their form: Connect would gather each message,
// copy it three times and allocate it anew, which an emulated CPU feels.
// Everything else of the call is Connect's.
type bulkCall struct {
	in  io.Reader
	out http.ResponseWriter
}

type bulkKey struct{}

// withBulk puts the HTTP side of calls of which it knows the form into their
// contexts.
func withBulk(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// All three frame messages alike, gRPC being where Connect has it from.
		switch strings.TrimPrefix(r.Header.Get("Content-Type"), "application/") {
		case "connect+proto", "grpc", "grpc+proto":
			call := &bulkCall{in: r.Body, out: w}
			r = r.WithContext(context.WithValue(r.Context(), bulkKey{}, call))
		}
		next.ServeHTTP(w, r)
	})
}

func bulkOf(ctx context.Context) (*bulkCall, error) {
	call, ok := ctx.Value(bulkKey{}).(*bulkCall)
	if !ok {
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("files are moved in protobuf's binary form only"))
	}
	return call, nil
}

// A message is framed by a byte of flags, none of which are known here, and
// its length as a big-endian uint32.
const framing = 5

// bulkReader reads messages that each consist of one field of bytes, and gives
// these bytes.
type bulkReader struct {
	in    io.Reader
	field protowire.Number
	left  uint64 // in the message
}

// newBulkReader reads what the call says after the messages that were taken
// from it already.
func newBulkReader(call *bulkCall, field protowire.Number) *bulkReader {
	in := call.in
	if b, ok := in.(interface{ Unbuffered() io.Reader }); ok {
		in = b.Unbuffered()
	}
	return &bulkReader{in: in, field: field}
}

// Read reads at most to the end of a message, straight into p.
func (r *bulkReader) Read(p []byte) (int, error) {
	for r.left == 0 {
		if err := r.next(); err != nil {
			return 0, err
		}
	}
	n, err := r.in.Read(p[:min(uint64(len(p)), r.left)])
	r.left -= uint64(n)
	if errors.Is(err, io.EOF) {
		err = nil
		if n == 0 && r.left > 0 {
			err = io.ErrUnexpectedEOF
		}
	}
	return n, err
}

// next reads up to the bytes of the next message; io.EOF is the end of all.
func (r *bulkReader) next() error {
	var head [framing + 2*binary.MaxVarintLen32]byte
	if _, err := io.ReadFull(r.in, head[:framing]); err != nil {
		return err
	}
	size := uint64(binary.BigEndian.Uint32(head[1:]))
	if head[0] != 0 || size > maxMessage {
		return errdefs.New(errdefs.Invalid, "a message of %d bytes with flags %#x: use at most %d and no flags", size, head[0], maxMessage)
	}
	if size == 0 {
		return nil
	}
	n := 0 // bytes of the field's tag and length
	for numbers := 0; numbers < 2; n++ {
		if uint64(n) == size || n == 2*binary.MaxVarintLen32 {
			return errNoBulk(r.field)
		}
		b := head[framing+n:][:1]
		if _, err := io.ReadFull(r.in, b); err != nil {
			return errors.Join(io.ErrUnexpectedEOF, err)
		}
		if b[0] < 0x80 {
			numbers++
		}
	}
	field, kind, k := protowire.ConsumeTag(head[framing : framing+n])
	if k < 0 || field != r.field || kind != protowire.BytesType {
		return errNoBulk(r.field)
	}
	length, m := protowire.ConsumeVarint(head[framing+k : framing+n])
	if m < 0 || length != size-uint64(n) {
		return errNoBulk(r.field)
	}
	r.left = length
	return nil
}

func errNoBulk(field protowire.Number) error {
	return errdefs.New(errdefs.Invalid, "a message does not consist of data alone, field %d", field)
}

// bulkPiece is the most bytes in a message that is written. So many go through
// package link without being gathered, and a frame of them still counts as one.
const bulkPiece = 2<<20 - 16

// bulkWriter writes bytes as messages that each consist of that field.
type bulkWriter struct {
	out   http.ResponseWriter
	field protowire.Number
}

// Write sends p.
func (w bulkWriter) Write(p []byte) (int, error) {
	sent := 0
	for sent < len(p) {
		data := p[sent:min(len(p), sent+bulkPiece)]
		head := make([]byte, framing, framing+2*binary.MaxVarintLen32)
		head = protowire.AppendTag(head, w.field, protowire.BytesType)
		head = protowire.AppendVarint(head, uint64(len(data)))
		binary.BigEndian.PutUint32(head[1:], uint32(len(head)-framing+len(data)))
		for _, b := range [][]byte{head, data} {
			if _, err := w.out.Write(b); err != nil {
				return sent, err
			}
		}
		if err := http.NewResponseController(w.out).Flush(); err != nil {
			return sent, err
		}
		sent += len(data)
	}
	return sent, nil
}
