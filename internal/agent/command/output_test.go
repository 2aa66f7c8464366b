//go:build linux

package command

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

func TestOutputBeforeTheFirstReaderIsKept(t *testing.T) {
	o := newOutput(true)
	o.write(false, []byte("early"))
	r := o.attach(true)
	p, _, err := r.Next(t.Context())
	if string(p) != "early" || err != nil || o.lost() != 0 {
		t.Errorf("read %q, %v, lost %d", p, err, o.lost())
	}
	r.Close()
	o.write(false, []byte("nobody reads it"))
	if o.lost() != 0 || o.size() != 20 {
		t.Errorf("lost %d, kept %d", o.lost(), o.size())
	}
	o.forget()
	if o.lost() != 15 || o.size() != 0 {
		t.Errorf("forgotten: lost %d, kept %d", o.lost(), o.size())
	}
}

// TestManySmallPieces: of streams that alternate all of the end is kept in
// order, in bounded memory, and those that were read are not lost.
func TestManySmallPieces(t *testing.T) {
	o := newOutput(true)
	first := o.attach(true)
	const n = 50000
	var want []byte
	for i := range n {
		o.write(i%2 == 1, []byte{byte(i), byte(i >> 8)})
		want = append(want, byte(i), byte(i>>8))
		if i < 100 {
			if p, stderr, err := first.Next(t.Context()); err != nil || len(p) != 2 || stderr != (i%2 == 1) {
				t.Fatalf("piece %d: %q, %t, %v", i, p, stderr, err)
			}
		}
	}
	first.Close()
	o.close()
	if got := len(o.segments); got > kept/segmentCost {
		t.Errorf("%d segments are kept", got)
	}
	if got, want := o.lost(), 2*uint64(n-100)-o.size(); got != want {
		t.Errorf("lost %d, want %d", got, want)
	}
	var got []byte
	again := o.attach(true)
	for {
		p, stderr, err := again.Next(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || stderr != (p[0]%2 == 1) {
			t.Fatalf("%q, %t, %v", p, stderr, err)
		}
		got = append(got, p...)
	}
	if len(got) < 10000 || !bytes.HasSuffix(want, got) {
		t.Errorf("the end of %d bytes is not that of what was written", len(got))
	}
}
