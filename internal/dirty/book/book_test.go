package book

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func pagesOf(pages ...int64) *dirty.Set {
	s := dirty.NewSet(100 * dirty.PageSize)
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
	b := New("run", "", 100*dirty.PageSize)
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
		b := New("run", "", 100*dirty.PageSize)
		b.Rebase(dirty.NewSet(100 * dirty.PageSize))
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
