package machinetest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// fullTests are the suite's tests of windows and of runs that continue. They
// are skipped where the host allows no look into memory.
func fullTests() map[string]func(*suite) {
	return map[string]func(*suite){
		"window leaves a run as it was":            (*suite).windowLeaves,
		"window in the wrong state":                (*suite).windowWrongState,
		"window switches the disk":                 (*suite).windowSwitches,
		"failed window leaves the run going":       (*suite).windowFails,
		"window with tracked memory":               (*suite).windowTracked,
		"window and memory of an ended run":        (*suite).windowEnded,
		"killed in the window":                     (*suite).killedInWindow,
		"continue":                                 (*suite).continueRun,
		"continue a run that continued":            (*suite).continueAgain,
		"adopt a run that continued":               (*suite).adoptContinued,
		"two runs of one memory":                   (*suite).twoOfOneMemory,
		"continue from what is damaged":            (*suite).continueDamaged,
		"cancelled continuation leaves nothing":    (*suite).continueCancelled,
		"platform is that of each run of a config": (*suite).platform,
	}
}

// kept is what a window kept of a run.
type kept struct {
	incoming machine.Incoming
	// disk is the chain below the top that the window switched to.
	disk  []machine.Layer
	times machine.WindowTimes
}

// memory looks into the run's memory, or skips the test.
func (s *suite) memory(r machine.Run) machine.Memory {
	s.t.Helper()
	m, err := r.Memory(s.ctx)
	if errdefs.Is(err, errdefs.Unsupported) {
		s.t.Skipf("memory: %v", err)
	}
	s.must(err)
	return m
}

// still calls f while the run stands still, if the strategy asks for it.
func (s *suite) still(r machine.Run, m machine.Memory, f func() (*dirty.Set, error)) *dirty.Set {
	s.t.Helper()
	if !m.Strategy().Live() {
		s.must(r.Pause(s.ctx))
		defer func() { s.must(r.Resume(s.ctx)) }()
	}
	set, err := f()
	s.must(err)
	return set
}

// awaitWrites returns when the running guest has written to its memory.
func (s *suite) awaitWrites(r machine.Run) {
	s.t.Helper()
	m := s.memory(r)
	defer func() { s.must(m.Close()) }()
	s.still(r, m, m.Arm)
	for tick := time.NewTicker(5 * time.Millisecond); ; {
		if s.still(r, m, m.Scan).Len() > 0 {
			tick.Stop()
			return
		}
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			s.t.Fatal("the running guest writes nothing")
		}
	}
}

// differing are the pages of the run, which stands still, that are not those
// of the file.
func (s *suite) differing(r machine.Run, path string, size int64) (pages []int64) {
	s.t.Helper()
	m := s.memory(r)
	defer func() { s.must(m.Close()) }()
	f, err := os.Open(path)
	s.must(err)
	defer f.Close()
	pages, err = compare(m, f, size)
	s.must(err)
	return pages
}

// compare returns the pages that are not the same in a and b.
func compare(a, b io.ReaderAt, size int64) (pages []int64, err error) {
	x, y := make([]byte, 1<<20), make([]byte, 1<<20)
	for offset := int64(0); offset < size; offset += int64(len(x)) {
		if _, err := a.ReadAt(x, offset); err != nil {
			return nil, err
		}
		if _, err := b.ReadAt(y, offset); err != nil {
			return nil, err
		}
		if bytes.Equal(x, y) {
			continue
		}
		for i := 0; i < len(x); i += dirty.PageSize {
			if !bytes.Equal(x[i:i+dirty.PageSize], y[i:i+dirty.PageSize]) {
				pages = append(pages, (offset+int64(i))/dirty.PageSize)
			}
		}
	}
	return pages, nil
}

// wantKept checks the memory of a run that continues and has not executed
// anything: it is what was kept but for the VM generation id, which a new run changes.
func (s *suite) wantKept(r machine.Run, k kept, size int64) []int64 {
	s.t.Helper()
	pages := s.differing(r, k.incoming.MemoryFile, size)
	if len(pages) > 1 {
		s.t.Errorf("pages %v of the loaded memory are not those that were kept", pages)
	}
	return pages
}

// state makes an empty file that a window can write to.
func state(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// window is one that keeps nothing but its own outcome.
func (s *suite) window(r machine.Run, w machine.Window) (machine.WindowTimes, error) {
	s.t.Helper()
	w.State = state(s.t, filepath.Join(s.t.TempDir(), "devices"))
	if w.Pages == nil {
		w.Pages = func(context.Context) error { return nil }
	}
	times, err := r.Window(s.ctx, w)
	if errdefs.Is(err, errdefs.Unsupported) {
		s.t.Skipf("window: %v", err)
	}
	return times, err
}

// keep keeps the run, as a full checkpoint does, and switches its disk.
func (s *suite) keep(r machine.Run, cfg machine.RunConfig, w machine.Window) kept {
	s.t.Helper()
	m := s.memory(r)
	defer func() { s.must(m.Close()) }()
	dir := s.t.TempDir()
	k := kept{
		incoming: machine.Incoming{
			MemoryFile: filepath.Join(dir, "memory"), DeviceState: filepath.Join(dir, "devices"), Checkpoint: "k",
		},
		disk: append([]machine.Layer(nil), cfg.Disk...),
	}
	top := s.Overlay(s.t)
	w.State, w.Top = state(s.t, k.incoming.DeviceState), &top
	w.Pages = func(context.Context) error {
		pages, err := m.Arm()
		if err != nil {
			return err
		}
		return copyMemory(k.incoming.MemoryFile, cfg, m, pages)
	}
	times, err := r.Window(s.ctx, w)
	if errdefs.Is(err, errdefs.Unsupported) {
		s.t.Skipf("window: %v", err)
	}
	s.must(err)
	k.times = times
	return k
}

// copyMemory makes the memory file: what the run began with, and its own pages.
func copyMemory(path string, cfg machine.RunConfig, m io.ReaderAt, pages *dirty.Set) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if cfg.Incoming != nil {
		below, err := os.Open(cfg.Incoming.MemoryFile)
		if err != nil {
			return err
		}
		defer below.Close()
		if _, err := io.Copy(f, below); err != nil {
			return err
		}
	}
	if err := f.Truncate(cfg.MemoryBytes); err != nil {
		return err
	}
	for offset, length := range pages.Runs() {
		b := make([]byte, length)
		if _, err := m.ReadAt(b, offset); err != nil {
			return err
		}
		if _, err := f.WriteAt(b, offset); err != nil {
			return err
		}
	}
	return nil
}

// next is the configuration of a run that continues from k, which was kept of
// a run of cfg.
func (s *suite) next(cfg machine.RunConfig, k kept) machine.RunConfig {
	s.t.Helper()
	next := s.Config(s.t)
	next.MemoryBytes, next.CPUs, next.Accelerator = cfg.MemoryBytes, cfg.CPUs, cfg.Accelerator
	next.Disk = append(append([]machine.Layer(nil), k.disk...), s.Overlay(s.t))
	incoming := k.incoming
	next.Incoming = &incoming
	return next
}
