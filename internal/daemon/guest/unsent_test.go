//go:build linux

package guest

import (
	"bytes"
	"strings"
	"testing"
)

// A client that takes nothing costs so much memory and no more; it is told what was
// left out, in its place.
func TestUnsent(t *testing.T) {
	u := newUnsent()
	u.add(bytes.Repeat([]byte("a"), mostUnsent-10))
	u.add(bytes.Repeat([]byte("b"), 20))
	u.add(bytes.Repeat([]byte("c"), 30))
	if piece := u.take(mostUnsent / 2); len(piece) != mostUnsent/2 {
		t.Fatalf("%d bytes", len(piece))
	}
	u.add([]byte("d"))
	u.add(bytes.Repeat([]byte("e"), mostUnsent))
	u.end()
	var rest []byte
	for piece := u.take(consoleChunk); len(piece) > 0; piece = u.take(consoleChunk) {
		rest = append(rest, piece...)
	}
	const want = "\r\n[holdpoint: 50 bytes were not shown, only logged]\r\nd\r\n[holdpoint: 1048576 bytes were not shown, only logged]\r\n"
	if got := strings.TrimLeft(string(rest), "a"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
