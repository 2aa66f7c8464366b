//go:build linux

// Package codec is protobuf's binary form for Connect, in which messages that
// carry bulk are written and read by hand. It changes nothing on the wire.
package codec

import (
	"encoding/binary"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoregistry"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/link"
)

// Codec is protobuf's binary form. The messages that carry bulk are written
// and read by hand, because what is spent on them is one copy, and
// link.Copy's is the fast one.
type Codec struct{}

// bulk is from which size that pays, in bytes.
const bulk = 4 << 10

// Prepare does what protobuf does at the first use of each message of the
// service. Done before a full checkpoint, it is in the memory of all that go on
// from there; else each of them would do it again, before it can say that it is
// ready.
func Prepare() {
	messages := agentv1.File_agent_v1_agent_proto.Messages()
	for i := range messages.Len() {
		if t, err := protoregistry.GlobalTypes.FindMessageByName(messages.Get(i).FullName()); err == nil {
			_ = proto.Size(t.Zero().Interface())
		}
	}
}

// Name is that of Connect's own codec, which this one replaces.
func (Codec) Name() string { return "proto" }

// IsBinary tells Connect that messages are no text.
func (Codec) IsBinary() bool { return true }

// Marshal returns the binary form of a message.
func (c Codec) Marshal(m any) ([]byte, error) { return c.MarshalAppend(nil, m) }

// MarshalStable is Marshal with one form for each message.
func (Codec) MarshalStable(m any) ([]byte, error) {
	p, ok := m.(proto.Message)
	if !ok {
		return nil, notAMessage(m)
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(p)
}

// MarshalAppend appends the binary form of a message to dst.
func (Codec) MarshalAppend(dst []byte, m any) ([]byte, error) {
	p, ok := m.(proto.Message)
	if !ok {
		return nil, notAMessage(m)
	}
	if field, data := bulkOut(p); len(data) >= bulk {
		dst = protowire.AppendTag(dst, field, protowire.BytesType)
		dst = binary.AppendUvarint(dst, uint64(len(data)))
		return link.Append(dst, data), nil
	}
	return proto.MarshalOptions{}.MarshalAppend(dst, p)
}

// bulkOut is the field that a message consists of, if it is one of bytes.
func bulkOut(m proto.Message) (protowire.Number, []byte) {
	switch m := m.(type) {
	case *agentv1.DialResponse:
		return 2, m.GetData()
	case *agentv1.ExecResponse:
		if p := m.GetStderr(); p != nil {
			return 3, p
		}
		return 2, m.GetStdout()
	}
	return 0, nil
}

// Unmarshal reads the binary form of a message into m.
func (Codec) Unmarshal(b []byte, m any) error {
	p, ok := m.(proto.Message)
	if !ok {
		return notAMessage(m)
	}
	if len(b) >= bulk && bulkIn(b, p) {
		return nil
	}
	return proto.Unmarshal(b, p)
}

// bulkIn reads a message that consists of the one field of bytes; false means
// that it is another message.
func bulkIn(b []byte, m proto.Message) bool {
	field, kind, n := protowire.ConsumeTag(b)
	if n < 0 || kind != protowire.BytesType {
		return false
	}
	data, k := protowire.ConsumeBytes(b[n:])
	if k < 0 || n+k != len(b) {
		return false
	}
	switch m := m.(type) {
	case *agentv1.DialRequest:
		if field == 2 {
			m.Message = &agentv1.DialRequest_Data{Data: link.Append(nil, data)}
			return true
		}
	case *agentv1.ExecRequest:
		if field == 3 {
			m.Message = &agentv1.ExecRequest_Stdin{Stdin: link.Append(nil, data)}
			return true
		}
	}
	return false
}

func notAMessage(m any) error { return fmt.Errorf("%T is no protobuf message", m) }
