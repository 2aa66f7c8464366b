package link

import (
	"bytes"
	"encoding/binary"
)

// scanner finds the first occurrence of a pattern in a stream that comes in
// pieces.
type scanner struct {
	pattern []byte
	// tail is the end of what was seen, shorter than the pattern.
	tail []byte
	// probes has a bit for the hash of each probeLen bytes of the pattern.
	probes [1 << probeBits / 64]uint64
}

// A pattern of n bytes holds a whole probe wherever it begins if one is taken
// at every n-probeLen+1 bytes. Looking only there is eight times as fast on an
// emulated CPU as bytes.Index, which looks for the first byte everywhere.
const (
	probeLen  = 4
	probeBits = 16
)

func probe(b []byte) uint32 {
	// The factor is 2^32 divided by the golden ratio (Knuth 6.4).
	return binary.LittleEndian.Uint32(b) * 0x9e3779b1 >> (32 - probeBits)
}

func newScanner(pattern []byte) *scanner {
	s := &scanner{pattern: pattern, tail: make([]byte, 0, 2*len(pattern))}
	for i := 0; i+probeLen <= len(pattern); i++ {
		h := probe(pattern[i:])
		s.probes[h/64] |= 1 << (h % 64)
	}
	return s
}

// index is bytes.Index(p, s.pattern).
func (s *scanner) index(p []byte) int {
	n := len(s.pattern)
	if n < 2*probeLen {
		return bytes.Index(p, s.pattern)
	}
	step := n - probeLen + 1
	for at := 0; at+probeLen <= len(p); at += step {
		h := probe(p[at:])
		if s.probes[h/64]&(1<<(h%64)) == 0 {
			continue
		}
		from := max(0, at-step+1)
		if i := bytes.Index(p[from:min(len(p), at+n)], s.pattern); i >= 0 {
			return from + i
		}
	}
	return -1
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
	if i := s.index(p); i >= 0 {
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
