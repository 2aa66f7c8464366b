package dirty_test

import (
	"bytes"
	"encoding/binary"
	"testing"

	"pgregory.net/rapid"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestSetInBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pages := rapid.Int64Range(1, 300).Draw(t, "pages")
		set := dirty.NewSet(pages * dirty.PageSize)
		for range rapid.IntRange(0, 20).Draw(t, "runs") {
			first := rapid.Int64Range(0, pages-1).Draw(t, "first")
			set.Add(first, rapid.Int64Range(0, pages-first).Draw(t, "count"))
		}
		b, err := set.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		var got dirty.Set
		if err := got.UnmarshalBinary(b); err != nil {
			t.Fatal(err)
		}
		again, _ := got.MarshalBinary()
		if !bytes.Equal(b, again) || got.Len() != set.Len() || got.MemoryBytes() != set.MemoryBytes() {
			t.Fatalf("a set of %d in %d pages became one of %d in %d", set.Len(), pages, got.Len(), got.MemoryBytes()/dirty.PageSize)
		}
		for page := range pages {
			if got.Has(page) != set.Has(page) {
				t.Fatalf("page %d differs", page)
			}
		}
	})
}

func TestSetFromOtherBytes(t *testing.T) {
	set := dirty.NewSet(70 * dirty.PageSize)
	set.Add(3, 1)
	good, err := set.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	change := func(f func(b []byte) []byte) []byte { return f(bytes.Clone(good)) }
	bad := map[string][]byte{
		"empty":       {},
		"short":       good[:10],
		"cut":         good[:len(good)-1],
		"long":        append(bytes.Clone(good), 0),
		"other magic": change(func(b []byte) []byte { b[0] = 'X'; return b }),
		"other count": change(func(b []byte) []byte { b[8]++; b[8] += 64; return b }),
		"huge count":  change(func(b []byte) []byte { binary.LittleEndian.PutUint64(b[8:], 1<<63); return b }),
		"overflow":    change(func(b []byte) []byte { binary.LittleEndian.PutUint64(b[8:], 1<<64-1); return b[:16] }),
		"behind":      change(func(b []byte) []byte { b[len(b)-1] = 0x80; return b }),
	}
	for name, b := range bad {
		got := dirty.NewSet(dirty.PageSize)
		if err := got.UnmarshalBinary(b); !errdefs.Is(err, errdefs.Storage) {
			t.Errorf("%s: %v", name, err)
		}
		if got.MemoryBytes() != dirty.PageSize {
			t.Errorf("%s: the set was changed", name)
		}
	}
	newer := change(func(b []byte) []byte { b[7]++; return b })
	if err := new(dirty.Set).UnmarshalBinary(newer); !errdefs.Is(err, errdefs.Incompatible) {
		t.Errorf("newer version: %v", err)
	}
}

func FuzzSetFromBytes(f *testing.F) {
	set := dirty.NewSet(70 * dirty.PageSize)
	set.Add(60, 10)
	good, _ := set.MarshalBinary()
	f.Add(good)
	f.Add(good[:16])
	f.Fuzz(func(t *testing.T, b []byte) {
		var got dirty.Set
		if got.UnmarshalBinary(b) != nil {
			return
		}
		if again, _ := got.MarshalBinary(); !bytes.Equal(b, again) {
			t.Errorf("%x was read as %x", b, again)
		}
		for offset, length := range got.Runs() {
			if offset+length > got.MemoryBytes() {
				t.Errorf("pages behind the memory")
			}
		}
	})
}
