package dirty

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/holdpoint/holdpoint/internal/errdefs"
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

func pagesOf(pages ...int64) *Set {
	s := NewSet(100 * PageSize)
	for _, p := range pages {
		s.Add(p, 1)
	}
	return s
}

func isKind(t *testing.T, err error, kind errdefs.Kind) {
	t.Helper()
	if !errdefs.Is(err, kind) {
		t.Errorf("%v (kind %q), want %s", err, errdefs.KindOf(err), kind)
	}
}

func TestBook(t *testing.T) {
	b := NewBook("run", "", 100*PageSize)
	if b.Known() {
		t.Error("a new book knows its set")
	}
	first := b.Epoch()
	c, err := b.Begin(first)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Seal()
	isKind(t, err, errdefs.WrongState)
	isKind(t, c.Publish("x"), errdefs.WrongState)
	b.Rebase(pagesOf(1, 2))
	b.Add(pagesOf(3))
	_, err = b.Begin(first)
	isKind(t, err, errdefs.MachineBusy)
	set, err := c.Seal()
	if err != nil || set.Len() != 3 {
		t.Errorf("sealed %v, %v", set, err)
	}
	_, err = c.Seal()
	isKind(t, err, errdefs.WrongState)
	b.Add(pagesOf(4))
	c.Abandon()
	c.Abandon()
	isKind(t, c.Publish("x"), errdefs.WrongState)
	if b.Pages().Len() != 4 || b.Epoch() != first {
		t.Errorf("after a failed capture: %d pages in %+v", b.Pages().Len(), b.Epoch())
	}

	c, err = b.Begin(first)
	if err != nil {
		t.Fatal(err)
	}
	if set, err = c.Seal(); err != nil || set.Len() != 4 {
		t.Errorf("sealed %v, %v", set, err)
	}
	b.Add(pagesOf(9))
	if err := c.Publish("c1"); err != nil {
		t.Fatal(err)
	}
	c.Abandon()
	if got := b.Pages(); got.Len() != 1 || !got.Has(9) {
		t.Errorf("after publishing: %d pages", got.Len())
	}
	second := b.Epoch()
	if second != (Epoch{RunID: "run", Parent: "c1", Number: 1}) {
		t.Errorf("epoch %+v", second)
	}
	for _, stale := range []Epoch{first, {RunID: "other", Parent: "c1", Number: 1}, {RunID: "run", Parent: "c2", Number: 1}} {
		_, err = b.Begin(stale)
		isKind(t, err, errdefs.Conflict)
	}
	b.Lost()
	_, err = b.Begin(second)
	isKind(t, err, errdefs.Conflict)
	if b.Known() {
		t.Error("a lost set is known")
	}
}

// TestBookLosesNoPage: whatever happens, each written page is in a published
// set or still in the book.
func TestBookLosesNoPage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := NewBook("run", "", 100*PageSize)
		b.Rebase(NewSet(100 * PageSize))
		owed := make(map[int64]bool)
		sealed := make(map[int64]bool)
		var c *Capture
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				p := rapid.Int64Range(0, 99).Draw(t, "page")
				b.Add(pagesOf(p))
				owed[p] = true
			},
			"capture": func(t *rapid.T) {
				if c == nil {
					c, _ = b.Begin(b.Epoch())
				} else if _, err := c.Seal(); err == nil {
					sealed, owed = owed, make(map[int64]bool)
				}
			},
			"publish": func(t *rapid.T) {
				if c != nil && c.Publish("x") == nil {
					c, sealed = nil, make(map[int64]bool)
				}
			},
			"abandon": func(t *rapid.T) {
				if c != nil {
					c.Abandon()
					for p := range sealed {
						owed[p] = true
					}
					c, sealed = nil, make(map[int64]bool)
				}
			},
			"": func(t *rapid.T) {
				got := b.Pages()
				if got.Len() != int64(len(owed)) {
					t.Fatalf("%d pages, want %d", got.Len(), len(owed))
				}
				for p := range owed {
					if !got.Has(p) {
						t.Fatalf("page %d is lost", p)
					}
				}
			},
		})
	})
}

func BenchmarkOr(b *testing.B) {
	x, y := NewSet(16<<30), NewSet(16<<30)
	y.Add(12345, 1<<20)
	for b.Loop() {
		x.Or(y)
	}
}
