//go:build linux

package qemu

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// copier copies written pages into a file, as a capture does.
type copier struct {
	memory machine.Memory
	file   *os.File
	buf    []byte
}

func newCopier(t testing.TB, r machine.Run, path string, size int64) *copier {
	t.Helper()
	m, err := r.Memory(ctxOf(t))
	must(t, err)
	f, err := os.Create(path)
	must(t, err)
	must(t, f.Truncate(size))
	t.Cleanup(func() {
		must(t, m.Close())
		must(t, f.Close())
	})
	return &copier{memory: m, file: f, buf: make([]byte, 1<<20)}
}

func (c *copier) copy(set *dirty.Set, err error) error {
	if err != nil {
		return err
	}
	for offset, length := range set.Runs() {
		for end := offset + length; offset < end; {
			b := c.buf[:min(int64(len(c.buf)), end-offset)]
			if _, err := c.memory.ReadAt(b, offset); err != nil {
				return err
			}
			if _, err := c.file.WriteAt(b, offset); err != nil {
				return err
			}
			offset += int64(len(b))
		}
	}
	return nil
}

func stateFile(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	must(t, err)
	return f
}

func median(times []time.Duration) time.Duration {
	slices.Sort(times)
	return times[len(times)/2]
}

// BenchmarkWindow prints where the time of windows goes, in ms: a guest with
// 2 vCPUs and 512 MiB writes to 200 pages each 10 ms.
func BenchmarkWindow(b *testing.B) {
	be := newBench(b)
	cfg := be.guest(b)(b)
	cfg.MemoryBytes = 512 << 20
	r := be.launch(b, cfg)
	c := newCopier(b, r, filepath.Join(be.dir, "copy"), cfg.MemoryBytes)
	must(b, c.copy(c.memory.Arm()))
	must(b, r.Resume(ctxOf(b)))
	k := dialGuest(b, r)
	k.want("ok", "dirty 20")
	phases := map[string][]time.Duration{}
	for b.Loop() {
		top := be.overlay(b)
		f := stateFile(b, filepath.Join(be.dir, "devices"))
		for range 2 {
			must(b, c.copy(c.memory.Scan()))
		}
		times, err := r.Window(ctxOf(b), machine.Window{
			State: f, Top: &top, Pages: func(context.Context) error { return c.copy(c.memory.Scan()) },
		})
		must(b, err)
		must(b, f.Close())
		for name, d := range map[string]time.Duration{
			"stop": times.Stop, "devices": times.Devices, "switch": times.Switch, "pages": times.Pages, "cont": times.Resume, "down": times.Downtime,
		} {
			phases[name] = append(phases[name], d)
		}
	}
	for name, times := range phases {
		m := median(times)
		b.ReportMetric(m.Seconds()*1e3, name+"-ms")
		if name == "down" {
			b.ReportMetric(times[len(times)*95/100].Seconds()*1e3, "down95-ms")
		}
	}
	_ = k.conn.Close()
}

// BenchmarkContinue prints how long a run takes that continues what was kept,
// to loaded, to running, and to the guest's first answer.
func BenchmarkContinue(b *testing.B) {
	be := newBench(b)
	cfg := be.guest(b)(b)
	cfg.MemoryBytes = 512 << 20
	r := be.launch(b, cfg)
	c := newCopier(b, r, filepath.Join(be.dir, "copy"), cfg.MemoryBytes)
	must(b, c.copy(c.memory.Arm()))
	must(b, r.Resume(ctxOf(b)))
	must(b, dialGuest(b, r).conn.Close())
	in := be.keep(b, r, c, be.overlay(b))
	must(b, r.Pause(ctxOf(b)))
	phases := map[string][]time.Duration{}
	for b.Loop() {
		next := be.next(b, cfg, in)
		start := time.Now()
		n, err := be.q.Launch(ctxOf(b), next)
		must(b, err)
		phases["loaded"] = append(phases["loaded"], time.Since(start))
		must(b, n.Resume(ctxOf(b)))
		phases["running"] = append(phases["running"], time.Since(start))
		k := dialGuest(b, n)
		phases["answer"] = append(phases["answer"], time.Since(start))
		_ = k.conn.Close()
		must(b, n.Kill(ctxOf(b)))
		must(b, n.Close())
	}
	for name, times := range phases {
		b.ReportMetric(median(times).Seconds()*1e3, name+"-ms")
	}
}
