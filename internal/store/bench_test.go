//go:build unix

package store

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// benchMemory is 192 MiB: a third noise, and two thirds that compress about as
// programs and their data do. HOLDPOINT_BENCH_MEMORY names a file with the
// memory of a real guest instead.
func benchMemory(b *testing.B) *os.File {
	b.Helper()
	if path := os.Getenv("HOLDPOINT_BENCH_MEMORY"); path != "" {
		f, err := os.Open(path)
		must(b, err)
		return f
	}
	f, err := os.Create(filepath.Join(b.TempDir(), "memory"))
	must(b, err)
	self, err := os.ReadFile("/proc/self/exe")
	must(b, err)
	_, err = f.Write(noise(1, 64<<20/PageSize))
	must(b, err)
	for at := int64(64 << 20); at < 192<<20; at += int64(len(self)) {
		_, err = f.WriteAt(self[:min(int64(len(self)), 192<<20-at)], at)
		must(b, err)
	}
	return f
}

// cpu reports the CPU time of each iteration, which other work on the machine
// changes less than the time that passes.
func cpu(b *testing.B) func() {
	used := func() time.Duration {
		var u unix.Rusage
		must(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	start := used()
	return func() { b.ReportMetric(float64((used()-start).Microseconds())/1000/float64(b.N), "cpu-ms/op") }
}

func BenchmarkStore(b *testing.B) {
	f := benchMemory(b)
	defer f.Close()
	st, err := f.Stat()
	must(b, err)
	size := st.Size()
	cfg := WriteConfig{ID: id(1), MemoryBytes: size, Pages: runsOf([2]int64{0, size / PageSize}), Memory: f}
	b.Run("write", func(b *testing.B) {
		b.SetBytes(size)
		defer cpu(b)()
		for b.Loop() {
			sum, err := Write(b.Context(), io.Discard, cfg)
			must(b, err)
			b.ReportMetric(float64(sum.Bytes)/(1<<20), "layer-MiB")
			b.ReportMetric(float64(sum.DataPages)*PageSize/(1<<20), "data-MiB")
		}
	})
	l, _ := file(b, cfg)
	b.Run("verify", func(b *testing.B) {
		b.SetBytes(size)
		defer cpu(b)()
		for b.Loop() {
			must(b, l.Verify(b.Context()))
		}
	})
	for _, unsynced := range []bool{true, false} {
		name := map[bool]string{true: "materialize-unsynced", false: "materialize-synced"}[unsynced]
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			defer cpu(b)()
			path := filepath.Join(b.TempDir(), "memory")
			for b.Loop() {
				must(b, Materialize(b.Context(), MaterializeConfig{Path: path, MemoryBytes: size, Layers: []*Layer{l}, Unsynced: unsynced}))
				must(b, os.Remove(path)) // in the place of an old file it would wait for the disk
			}
		})
	}
	// 2048 pages all over the memory, compared with a layer that has them all.
	b.Run("compare-2048-scattered", func(b *testing.B) {
		var runs [][2]int64
		for i := range int64(2048) {
			runs = append(runs, [2]int64{i * (size / PageSize / 2048), 1})
		}
		defer cpu(b)()
		v, err := NewView(nil, size, l)
		must(b, err)
		for b.Loop() {
			_, err := Write(b.Context(), io.Discard, WriteConfig{
				ID: id(2), Parent: id(1), MemoryBytes: size, Pages: runsOf(runs...), Memory: f, Previous: v,
			})
			must(b, err)
		}
	})
}

// benchChain is a guest's memory of 512 MiB with 192 MiB in use, as the lowest
// of 21 layers; each other one has 3 MiB of changes in runs of 1 to 8 pages. It
// gives their paths and the memory.
func benchChain(b *testing.B) ([]string, []byte) {
	b.Helper()
	f := benchMemory(b)
	defer f.Close()
	const pages = 512 << 20 / PageSize
	memory := make([]byte, pages*PageSize)
	n, err := f.ReadAt(memory, 0)
	if err != io.EOF {
		must(b, err)
	}
	dir := b.TempDir()
	var paths []string
	runs := [][2]int64{{0, pages}}
	random := rand.New(rand.NewPCG(1, 1))
	for i := range 21 {
		out, err := os.Create(filepath.Join(dir, id(i+1)))
		must(b, err)
		_, err = Write(b.Context(), out, WriteConfig{
			ID: id(i + 1), Parent: id(i), MemoryBytes: pages * PageSize, Pages: runsOf(runs...), Memory: bytes.NewReader(memory),
		})
		must(b, err)
		must(b, out.Close())
		paths, runs = append(paths, out.Name()), nil
		const part = 284 // so that there are 768 pages
		for at := random.Int64N(part); i < 20 && at < int64(n)/PageSize-8; at += 1 + random.Int64N(2*part) {
			count := 1 + random.Int64N(8)
			runs = append(runs, [2]int64{at, count})
			for p := at; p < at+count; p++ { // half of each page
				copy(memory[p*PageSize:], noise(uint64(p)*100+uint64(i), 1)[:PageSize/2])
			}
			at += count
		}
	}
	return paths, memory
}

func openChain(b *testing.B, paths []string) []*Layer {
	b.Helper()
	var chain []*Layer
	for _, path := range paths {
		l, err := Open(path)
		must(b, err)
		chain = append(chain, l)
	}
	return chain
}

func closeChain(chain []*Layer) {
	for _, l := range chain {
		_ = l.Close()
	}
}

// BenchmarkChain is what a restore of a machine with 20 checkpoints does.
func BenchmarkChain(b *testing.B) {
	paths, memory := benchChain(b)
	b.Run("open", func(b *testing.B) {
		defer cpu(b)()
		for b.Loop() {
			closeChain(openChain(b, paths))
		}
	})
	size := int64(len(memory))
	dir := b.TempDir()
	chain := openChain(b, paths)
	defer closeChain(chain)
	must(b, Materialize(b.Context(), MaterializeConfig{Path: filepath.Join(dir, "base"), MemoryBytes: size, Layers: chain[:20], Unsynced: true}))
	base, err := os.Open(filepath.Join(dir, "base"))
	must(b, err)
	defer base.Close()
	for _, c := range []struct {
		name   string
		layers int
		base   io.ReaderAt
		spare  bool
	}{
		{"one-layer", 1, nil, false},
		{"21-layers", 21, nil, false},
		{"base-of-20-layers", 21, base, false},
		{"spare-of-20-layers", 21, nil, true},
	} {
		b.Run("materialize-"+c.name, func(b *testing.B) {
			path := filepath.Join(dir, "memory")
			defer cpu(b)()
			for b.Loop() {
				cfg := MaterializeConfig{Path: path, MemoryBytes: size, Layers: chain[:c.layers], Base: c.base, Unsynced: true}
				if c.spare {
					b.StopTimer()
					cfg.Spare = filepath.Join(dir, "spare")
					must(b, Materialize(b.Context(), MaterializeConfig{Path: cfg.Spare, MemoryBytes: size, Layers: chain[:20], Unsynced: true}))
					b.StartTimer()
				}
				must(b, Materialize(b.Context(), cfg))
				// In the place of an old file it would wait for the disk.
				must(b, os.Remove(path))
			}
		})
	}
}
