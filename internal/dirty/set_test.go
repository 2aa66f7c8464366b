package dirty

import (
	"testing"

	"pgregory.net/rapid"
)

// TestSetAgainstAMap compares a set with the plainest one there is.
func TestSetAgainstAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pages := rapid.Int64Range(0, 300).Draw(t, "pages")
		s, other := NewSet(pages*PageSize), NewSet(pages*PageSize)
		model := make(map[int64]bool)
		for range rapid.IntRange(0, 8).Draw(t, "adds") {
			first := rapid.Int64Range(0, pages).Draw(t, "first")
			count := rapid.Int64Range(0, pages-first).Draw(t, "count")
			into := s
			if rapid.Bool().Draw(t, "other") {
				into = other
			}
			into.Add(first, count)
			for p := first; p < first+count; p++ {
				model[p] = true
			}
		}
		s.Or(other)
		if s.Len() != int64(len(model)) || s.Bytes() != s.Len()*PageSize || s.MemoryBytes() != pages*PageSize {
			t.Fatalf("%d pages, want %d", s.Len(), len(model))
		}
		end := int64(-1)
		seen := int64(0)
		for offset, length := range s.Runs() {
			first, count := offset/PageSize, length/PageSize
			if first <= end || count < 1 { // <=: neighbors are one run
				t.Fatalf("run %d+%d after %d", first, count, end)
			}
			for p := first; p < first+count; p++ {
				if !model[p] || !s.Has(p) {
					t.Fatalf("page %d is too much", p)
				}
			}
			seen += count
			end = first + count
		}
		if seen != s.Len() || s.Has(-1) || s.Has(pages) {
			t.Fatalf("runs have %d pages of %d", seen, s.Len())
		}
		c := s.Clone()
		c.And(other)
		for p := range pages {
			if c.Has(p) != other.Has(p) { // which is a part of s
				t.Fatalf("page %d after and", p)
			}
		}
		c = s.Clone()
		c.Remove(other)
		for p := range pages {
			if c.Has(p) != (s.Has(p) && !other.Has(p)) {
				t.Fatalf("page %d after remove", p)
			}
		}
		c = s.Clone()
		s.Clear()
		if s.Len() != 0 || c.Len() != seen {
			t.Fatal("clone or clear")
		}
	})
}

func TestSetPanicsOnPagesThatAreNot(t *testing.T) {
	for _, add := range [][2]int64{{-1, 1}, {0, -1}, {9, 2}, {11, 0}, {1 << 62, 1 << 62}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("added %v", add)
				}
			}()
			NewSet(10*PageSize).Add(add[0], add[1])
		}()
	}
}

func BenchmarkOr(b *testing.B) {
	x, y := NewSet(16<<30), NewSet(16<<30)
	y.Add(12345, 1<<20)
	for b.Loop() {
		x.Or(y)
	}
}
