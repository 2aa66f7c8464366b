// Package link is the conversation over the agent link: one byte channel
// between the host and the process in the guest that outlives every
// connection made over it. The channel (a virtio-serial port) can be opened
// once only in the guest, reports its end unreliably, and hands bytes of an
// old conversation to a new one, also after a restore. So a conversation
// begins like this:
//
//	host  → guest   magic (16 bytes)  nonce (8 bytes)
//	guest → host    magic (16 bytes)  nonce (8 bytes)
//
// The magic is random for each machine, the nonce for each conversation. The
// guest looks for the magic in all it reads; where it finds it, it ends the
// conversation before and answers. The host discards what it reads until the
// answer. All bytes after that belong to the conversation.
//
// What is said in a conversation is HTTP/2; this package knows only how its
// ends are tuned to the channel (see Transport and HTTP2).
package link

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	magicLen = 16
	nonceLen = 8
	helloLen = magicLen + nonceLen
)

// Magic begins each conversation with one machine.
type Magic [magicLen]byte

// NewMagic returns a random magic.
func NewMagic() Magic {
	var m Magic
	_, _ = rand.Read(m[:]) // never fails, see crypto/rand
	return m
}

// ParseMagic reads the form that String writes: 32 hexadecimal digits.
func ParseMagic(s string) (Magic, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != magicLen {
		return Magic{}, errdefs.New(errdefs.Invalid, "link magic %q: use 32 hexadecimal digits", s)
	}
	return Magic(b), nil
}

// String is the magic as 32 lower-case hexadecimal digits.
func (m Magic) String() string { return hex.EncodeToString(m[:]) }

// scanner finds the first occurrence of a pattern in a stream that comes in
// pieces.
type scanner struct {
	pattern []byte
	// tail is the end of what was seen, shorter than the pattern.
	tail []byte
}

func newScanner(pattern []byte) *scanner {
	return &scanner{pattern: pattern, tail: make([]byte, 0, 2*len(pattern))}
}

// scan looks at the next piece of the stream. It returns the index in p that
// follows the first occurrence of the pattern, or -1. After a hit the scanner
// begins anew; the rest of p has not been looked at.
func (s *scanner) scan(p []byte) int {
	if len(p) == 0 {
		return -1
	}
	if n := len(s.tail); n > 0 {
		joined := append(s.tail, p[:min(len(p), len(s.pattern)-1)]...)
		if i := bytes.Index(joined, s.pattern); i >= 0 {
			s.tail = s.tail[:0]
			return i + len(s.pattern) - n
		}
	}
	if i := bytes.Index(p, s.pattern); i >= 0 {
		s.tail = s.tail[:0]
		return i + len(s.pattern)
	}
	keep := len(s.pattern) - 1
	if len(p) < keep {
		s.tail = append(s.tail, p...)
		if over := len(s.tail) - keep; over > 0 {
			s.tail = append(s.tail[:0], s.tail[over:]...)
		}
	} else {
		s.tail = append(s.tail[:0], p[len(p)-keep:]...)
	}
	return -1
}

// partial is how many of the last bytes seen may be the pattern's beginning.
func (s *scanner) partial() int {
	for n := len(s.tail); n > 0; n-- {
		if bytes.HasSuffix(s.tail, s.pattern[:n]) {
			return n
		}
	}
	return 0
}
