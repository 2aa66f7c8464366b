package relay

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
)

// TestEnvelopesPassWhole holds, for any cutting of a stream into reads, that
// all of it passes in order, that what passed ends with a message unless one
// was too long to keep, and that the end is seen.
func TestEnvelopesPassWhole(t *testing.T) {
	const room = 64
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var stream []byte
		ends := map[int]bool{0: true}
		long := false
		for range random.IntN(8) {
			size := random.IntN(room - envelopeHeader)
			if random.IntN(10) == 0 {
				size, long = room+random.IntN(3*room), true
			}
			stream = append(stream, make([]byte, envelopeHeader+size)...)
			binary.BigEndian.PutUint32(stream[len(stream)-size-4:], uint32(size))
			ends[len(stream)] = true
		}
		last := len(stream)
		stream = append(stream, flagEnd, 0, 0, 0, 2, '{', '}')
		ends[len(stream)] = true

		var e envelopes
		var passed []byte
		buf, kept, from := make([]byte, room), 0, stream
		for len(from) > 0 {
			n := copy(buf[kept:], from[:1+random.IntN(len(from))])
			kept, from = kept+n, from[n:]
			pass := e.whole(buf[:kept], kept == room)
			passed = append(passed, buf[:pass]...)
			kept = copy(buf, buf[pass:kept])
			if e.rest == 0 && !ends[len(passed)] || e.rest > 0 && !long {
				t.Fatalf("%d of %d bytes passed, rest %d; messages end at %v", len(passed), len(stream), e.rest, ends)
			}
			if e.ended && len(passed) < last {
				t.Fatal("the end is seen too early")
			}
		}
		if !bytes.Equal(passed, stream) || !e.ended {
			t.Fatalf("%d of %d bytes passed, ended %t", len(passed), len(stream), e.ended)
		}
	}
}
