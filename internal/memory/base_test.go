package memory

import (
	"bytes"
	"os"
	"testing"
	"time"

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
// 20 pages of its own, and gives the memory of each.
func (w *world) family(n int) [][]byte {
	w.t.Helper()
	const pages = 600
	memory := noise(1, pages)
	clear(memory[500*store.PageSize : 520*store.PageSize])
	w.layer(1, 0, memory, 0, pages)
	all := [][]byte{nil, memory}
	for l := 2; l <= n; l++ {
		memory = bytes.Clone(memory)
		copy(memory[l*25*store.PageSize:], noise(uint64(l), 20))
		w.layer(l, l-1, memory, int64(l)*25, 20)
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

// TestOnlyLikelyFilesAreBases: those of the chain, and else those used last.
func TestOnlyLikelyFilesAreBases(t *testing.T) {
	w := newWorld(t)
	memory := w.family(2)
	w.holds(1, []int{1}, memory[1])
	old := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(w.path(id(1)), old, old))
	for n := 11; n <= 16; n++ {
		w.layer(n, 0, noise(uint64(n), 600), 0, 600)
		_, release := w.open(full(n))
		release()
	}
	if got := w.bases([]string{id(1), id(2)}); len(got) != mostBases || got[0] != w.path(id(1)) || got[1] != w.path(id(16)) {
		t.Errorf("looks into %v", got)
	}
	list, err := w.records.GetLayers(t.Context(), id(1), id(2))
	must(t, err)
	layers, done, err := w.Cache.open(list)
	must(t, err)
	defer done()
	must(t, os.Truncate(w.path(id(1)), 599*store.PageSize))
	if f := w.base([]string{id(1), id(2)}, layers); f != nil {
		t.Errorf("%s is of another size or another memory", f.Name())
	}
}
