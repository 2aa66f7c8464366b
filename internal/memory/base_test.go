package memory

import (
	"bytes"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/store"
)

// spoil changes a byte in the first payload of a layer, which is found when
// that is read.
func (w *world) spoil(n int) {
	w.t.Helper()
	path := w.home.MemoryLayer(id(n))
	b, err := os.ReadFile(path)
	must(w.t, err)
	b[70]++
	must(w.t, os.Remove(path)) // sealed layers may be read-only
	must(w.t, os.WriteFile(path, b, 0o400))
}

// family writes layer 1 and the layers 2 to n above it, each of which changes
// 5 pages of its own, and gives the memory of each.
func (w *world) family(n int) [][]byte {
	w.t.Helper()
	const pages = 600
	memory := noise(1, pages)
	clear(memory[500*store.PageSize : 520*store.PageSize])
	w.layer(1, 0, memory, 0, pages)
	all := [][]byte{nil, memory}
	for l := 2; l <= n; l++ {
		memory = bytes.Clone(memory)
		copy(memory[l*25*store.PageSize:], noise(uint64(l), 5))
		w.layer(l, l-1, memory, int64(l)*25, 5)
		all = append(all, memory)
	}
	return all
}

func (w *world) holds(k int, chain []int, memory []byte) {
	w.t.Helper()
	f, release := w.open(full(chain...))
	defer release()
	got, err := os.ReadFile(f.Path)
	if must(w.t, err); !f.Made || !bytes.Equal(got, memory) {
		w.t.Errorf("the memory of layer %d differs, or was there: made %v", k, f.Made)
	}
}

// TestPagesComeFromAFileThatIsLike: from one of the chain, or of another
// checkpoint, whatever its layers are.
func TestPagesComeFromAFileThatIsLike(t *testing.T) {
	w := newWorld(t)
	memory := w.family(3)
	w.holds(3, []int{1, 2, 3}, memory[3])
	w.spoil(1)
	if _, _, err := w.Open(t.Context(), full(1)); !errdefs.Is(err, errdefs.Storage) {
		t.Errorf("of some pages only the damaged layer is left: %v", err)
	}
	w.namesAre(3)
	other := bytes.Clone(memory[2])
	copy(other[90*store.PageSize:], noise(99, 30)) // covers what layer 3 has
	w.layer(4, 2, other, 60, 60)
	w.holds(4, []int{1, 2, 4}, other)
	w.namesAre(3, 4)
}

// sample is one of the memory of a chain.
func (w *world) sample(chain ...int) *store.Sample {
	w.t.Helper()
	list, err := w.records.GetLayers(w.t.Context(), full(chain...).Full.Memory...)
	must(w.t, err)
	layers, done, err := w.Cache.open(list)
	must(w.t, err)
	defer done()
	s, err := store.NewSample(layers[0].Info().MemoryBytes, layers)
	must(w.t, err)
	return s
}

// TestWhereABaseIsLookedFor: among the files of the chain, and else among those
// used last; and it has to be of the same size.
func TestWhereABaseIsLookedFor(t *testing.T) {
	w := newWorld(t)
	memory := w.family(2)
	w.holds(1, []int{1}, memory[1])
	old := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(w.path(id(1)), old, old))
	for n := 11; n <= 14; n++ {
		w.layer(n, 0, noise(uint64(n), 600), 0, 600)
		_, release := w.open(full(n))
		release()
	}
	sample := w.sample(1, 2)
	is := func(what string, f *os.File, n int) {
		t.Helper()
		if f == nil && n == 0 {
			return
		}
		if f == nil || f.Name() != w.path(id(n)) {
			t.Errorf("%s: %v", what, f)
		}
		if f != nil {
			must(t, f.Close())
		}
	}
	size := int64(600 * store.PageSize)
	is("one of the chain", w.base([]string{id(1), id(2)}, size, sample), 1)
	is("one used long ago", w.base([]string{id(8), id(2)}, size, sample), 0)
	must(t, os.Chtimes(w.path(id(1)), time.Time{}, time.Now()))
	is("the one used last", w.base([]string{id(8), id(2)}, size, sample), 1)
	must(t, os.Truncate(w.path(id(1)), size-store.PageSize))
	is("of another size", w.base([]string{id(1), id(2)}, size, sample), 0)
}

// TestUnusedFileIsRewritten: but none of those used last, none that a run maps or
// somebody has opened, and none that is not like the wanted one.
func TestUnusedFileIsRewritten(t *testing.T) {
	const files = keptUnused + 1 // of layers 1 and on
	chain := func(top int) (ids []int) {
		for n := 1; n <= top; n++ {
			ids = append(ids, n)
		}
		return ids
	}
	for name, c := range map[string]struct {
		change func(*world)
		left   []int
	}{
		"unused":        {func(*world) {}, []int{2, 3, 4, 5, 6}},
		"mapped":        {func(w *world) { w.records.use(id(1)) }, []int{1, 2, 3, 4, 5, 6}},
		"another":       {func(w *world) { w.records.use(id(4)) }, []int{1, 2, 3, 4, 5, 6}},
		"nothing known": {func(w *world) { w.records.fail = true }, []int{1, 2, 3, 4, 5, 6}},
		"opened": {func(w *world) {
			_, release := w.open(full(1))
			w.t.Cleanup(release)
			must(w.t, os.Chtimes(w.path(id(1)), time.Time{}, time.Now().Add(-time.Hour)))
		}, []int{1, 2, 3, 4, 5, 6}},
		"opened meanwhile": {func(w *world) {
			w.records.asked = func() {
				w.records.asked = nil
				_, release := w.open(full(1))
				release()
				must(w.t, os.Chtimes(w.path(id(1)), time.Time{}, time.Now().Add(-time.Hour)))
			}
		}, []int{1, 2, 3, 4, 5, 6}},
		"unlike": {func(w *world) {
			must(w.t, os.WriteFile(w.path(id(1)), noise(9, 600), 0o600))
			must(w.t, os.Chtimes(w.path(id(1)), time.Time{}, time.Now().Add(-time.Hour)))
		}, []int{1, 2, 3, 4, 5, 6}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			memory := w.family(files + 1)
			for n := 1; n <= files; n++ {
				w.holds(n, chain(n), memory[n])
			}
			c.change(w)
			w.holds(files+1, chain(files+1), memory[files+1])
			w.namesAre(c.left...)
			w.records.fail = false
			if c.left[0] == 2 {
				w.holds(1, chain(1), memory[1]) // made anew, of another one
				w.namesAre(1, 3, 4, 5, 6)
			}
		})
	}
}

// TestCrashWhileAFileIsRewritten: it is neither what it was nor what it was to be.
func TestCrashWhileAFileIsRewritten(t *testing.T) {
	w := newWorld(t)
	memory := w.family(keptUnused + 2)
	var chain []int
	for n := 1; n <= keptUnused+1; n++ {
		chain = append(chain, n)
		w.holds(n, chain, memory[n])
	}
	chain = append(chain, keptUnused+2)
	for k := 1; ; k++ {
		steps := 0
		w.files.Before = func(durable.Step) error {
			if steps++; steps > k {
				return errors.New("crash")
			}
			return nil
		}
		_, release, err := w.Open(t.Context(), full(chain...))
		w.files.Before = nil
		w.reopen("boot1", 0)
		if err == nil {
			release()
			break
		}
		w.namesAre(2, 3, 4, 5)
		must(t, os.WriteFile(w.path(id(1)), memory[1], 0o600)) // for the next step
		must(t, os.Chtimes(w.path(id(1)), time.Time{}, time.Now().Add(-time.Hour)))
	}
	w.namesAre(2, 3, 4, 5, 6)
	f, release := w.open(full(chain...))
	defer release()
	if got, err := os.ReadFile(f.Path); err != nil || !bytes.Equal(got, memory[keptUnused+2]) {
		t.Errorf("the memory differs: %v", err)
	}
}
