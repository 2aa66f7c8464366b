package relay

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/holdpoint/holdpoint/internal/wire"
)

// The frame of a message in a stream of the Connect protocol, "Streaming-RPCs"
// in its specification (connectrpc.com/docs/protocol): one byte of flags, four
// of length, big endian. A message with flagEnd ends the stream and is JSON.
const (
	envelopeHeader = 5
	flagEnd        = 0x02
)

// envelopes follows a stream to know where its messages end.
type envelopes struct {
	// rest is how many bytes of a message that was let through in part are
	// still to come.
	rest int
	// ended says that the last message, which ends the stream, was seen.
	ended bool
}

// whole is how many of the bytes b can be let through: those up to the end of
// the last complete message. full: all, because no more can be kept.
func (e *envelopes) whole(b []byte, full bool) (n int) {
	for {
		if skip := min(e.rest, len(b)-n); skip > 0 {
			n, e.rest = n+skip, e.rest-skip
		}
		if e.rest > 0 || len(b)-n < envelopeHeader {
			return n
		}
		size := int(binary.BigEndian.Uint32(b[n+1 : n+envelopeHeader]))
		if len(b)-n-envelopeHeader < size && (n > 0 || !full) {
			return n
		}
		e.ended = e.ended || b[n]&flagEnd != 0
		n += envelopeHeader
		e.rest = size
	}
}

// endWith is the message that ends a stream with an error.
func endWith(err *connect.Error) ([]byte, error) {
	type detail struct {
		Type  string `json:"type"`
		Value string `json:"value"`
	}
	var end struct {
		Error struct {
			Code    string   `json:"code"`
			Message string   `json:"message"`
			Details []detail `json:"details,omitempty"`
		} `json:"error"`
	}
	end.Error.Code, end.Error.Message = err.Code().String(), err.Message()
	for _, d := range err.Details() {
		end.Error.Details = append(end.Error.Details, detail{Type: d.Type(), Value: base64.RawStdEncoding.EncodeToString(d.Bytes())})
	}
	body, failed := json.Marshal(end)
	if failed != nil {
		return nil, failed
	}
	b := append([]byte{flagEnd}, 0, 0, 0, 0)
	binary.BigEndian.PutUint32(b[1:], uint32(len(body)))
	return append(b, body...), nil
}

// Unavailable is why with the code unavailable; the kind of why says more.
func Unavailable(why error) *connect.Error {
	err := connect.NewError(connect.CodeUnavailable, errors.New(why.Error()))
	if detail, failed := connect.NewErrorDetail(proto.Message(wire.Info(why))); failed == nil {
		err.AddDetail(detail)
	}
	return err
}
