//go:build unix

package store

import (
	"io"
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
