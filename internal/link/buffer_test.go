package link

import (
	"bytes"
	"testing"
)

func TestBuffer(t *testing.T) {
	in := bytes.NewReader(bytes.Repeat([]byte("0123456789abcdef"), 1<<16))
	var b Buffer
	var got []int
	total := 0
	for in.Len() > 0 {
		piece, err := b.Read(in)
		if err != nil || len(piece) == 0 {
			t.Fatalf("%d bytes, %v", len(piece), err)
		}
		for i, c := range piece {
			if c != "0123456789abcdef"[(total+i)%16] {
				t.Fatalf("byte %d is %q", total+i, c)
			}
		}
		total += len(piece)
		got = append(got, len(piece))
	}
	if total != 1<<20 || got[0] != leastBuffer || got[1] != 8*leastBuffer || got[2] != mostBuffer || got[3] != mostBuffer {
		t.Errorf("pieces of %d", got)
	}
	// What says little stays cheap.
	if n := testing.AllocsPerRun(10, func() {
		if _, err := b.Read(bytes.NewReader([]byte("x"))); err != nil {
			t.Fatal(err)
		}
	}); n > 2 { // the reader and its bytes
		t.Errorf("%v allocations", n)
	}
}
