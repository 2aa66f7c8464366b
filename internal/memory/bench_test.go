package memory

import (
	"testing"

	"github.com/holdpoint/holdpoint/internal/store"
)

// BenchmarkChain is a memory of 64 MiB with changes of 2 MiB in each of 99
// layers above: what each capture opens, and what a restore puts together.
func BenchmarkChain(b *testing.B) {
	w := newWorld(b)
	const pages, change = 16384, 512
	memory := noise(1, pages)
	var chain []int
	for n := range 100 {
		first, count := int64(n*97%(pages-change)), int64(change)
		if n == 0 {
			first, count = 0, pages
		}
		copy(memory[first*store.PageSize:], noise(uint64(n), int(count)))
		w.layer(n+1, n, memory, first, count)
		chain = append(chain, n+1)
	}
	k := full(chain...)
	b.Run("view", func(b *testing.B) {
		for b.Loop() {
			list, err := w.records.GetLayers(b.Context(), k.Full.Memory...)
			must(b, err)
			_, done, err := w.View(b.Context(), list)
			must(b, err)
			done()
		}
	})
	b.Run("make", func(b *testing.B) {
		b.SetBytes(int64(len(memory)))
		for b.Loop() {
			f, release := w.open(k)
			release()
			must(b, w.files.RemoveUnsynced(f.Path))
		}
	})
}
