package link

import (
	"bytes"
	"testing"
)

// FuzzScanner compares the scanner, fed in pieces, with bytes.Index over the
// whole.
func FuzzScanner(f *testing.F) {
	f.Add([]byte("aab"), []byte("aaaaaab"), uint8(2))
	f.Add([]byte("abcabd"), []byte("abcabcabcabd"), uint8(1))
	f.Add([]byte("a"), []byte("xa"), uint8(9))
	f.Fuzz(func(t *testing.T, pattern, stream []byte, step uint8) {
		if len(pattern) == 0 || len(pattern) > 32 || step == 0 {
			return
		}
		want := bytes.Index(stream, pattern)
		s := newScanner(pattern)
		for at := 0; at < len(stream); at += int(step) {
			p := stream[at:min(len(stream), at+int(step))]
			end := s.scan(p)
			if end >= 0 {
				if got := at + end - len(pattern); got != want {
					t.Fatalf("found at %d, want %d", got, want)
				}
				return
			}
			seen := stream[:at+len(p)]
			k := s.partial()
			if k > len(seen) || !bytes.HasSuffix(seen, pattern[:k]) {
				t.Fatalf("partial %d is no beginning of the pattern", k)
			}
			for n := k + 1; n < len(pattern) && n <= len(seen); n++ {
				if bytes.HasSuffix(seen, pattern[:n]) {
					t.Fatalf("partial %d, but %d match", k, n)
				}
			}
		}
		if want >= 0 {
			t.Fatalf("not found, want %d", want)
		}
	})
}

func TestIndexAtEveryPlace(t *testing.T) {
	for _, size := range []int{16, 24} {
		pattern := make([]byte, size)
		for i := range pattern {
			pattern[i] = byte(i % 3) // its probes are everywhere in the text
		}
		pattern[size-1] = 9
		s := newScanner(pattern)
		for length := size; length < 90; length++ {
			for at := 0; at+size <= length; at++ {
				text := make([]byte, length)
				for i := range text {
					text[i] = byte(i % 3)
				}
				if i := s.index(text); i != -1 {
					t.Fatalf("found at %d where it is not", i)
				}
				copy(text[at:], pattern)
				if i, want := s.index(text), bytes.Index(text, pattern); i != want {
					t.Fatalf("length %d: found at %d, want %d", length, i, want)
				}
			}
		}
	}
}
