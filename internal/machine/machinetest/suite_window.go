package machinetest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

func (s *suite) windowLeaves() {
	r := s.launch(s.Config(s.t))
	s.must(r.Resume(s.ctx))
	still := func(context.Context) error {
		running, err := r.Running(s.ctx)
		if err == nil && running {
			err = errors.New("the vCPUs run in the window")
		}
		return err
	}
	times, err := s.window(r, machine.Window{Pages: still})
	s.must(err)
	s.wantRunning(r, true)
	if sum := times.Stop + times.Devices + times.Switch + times.Resume; times.Stop <= 0 || times.Pages <= 0 || times.Downtime < sum {
		s.t.Errorf("times are %+v", times)
	}
	_, err = s.window(r, machine.Window{Pages: still, StayPaused: true})
	s.must(err)
	s.wantRunning(r, false)
	for _, stay := range []bool{false, true} {
		times, err = s.window(r, machine.Window{Pages: still, WasPaused: true, StayPaused: stay})
		s.must(err)
		s.wantRunning(r, false)
	}
	s.must(r.Resume(s.ctx))
	s.wantRunning(r, true)
}

func (s *suite) windowWrongState() {
	r := s.launch(s.Config(s.t))
	never := func(context.Context) error {
		s.t.Error("pages were read")
		return nil
	}
	_, err := s.window(r, machine.Window{Pages: never})
	s.wantKind("window of a paused run", err, errdefs.WrongState)
	s.wantRunning(r, false)
	s.must(r.Resume(s.ctx))
	_, err = s.window(r, machine.Window{Pages: never, WasPaused: true})
	s.wantKind("window of a running run said to be paused", err, errdefs.WrongState)
	s.wantRunning(r, true)
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	_, err = r.Window(ctx, machine.Window{State: state(s.t, s.t.TempDir()+"/devices"), Pages: never})
	s.wantKind("window, cancelled", err, errdefs.Interrupted)
	s.wantRunning(r, true)
}

func (s *suite) windowSwitches() {
	cfg := s.Config(s.t)
	r := s.launch(cfg)
	s.must(r.Resume(s.ctx))
	for range 3 {
		top := s.Overlay(s.t)
		_, err := s.window(r, machine.Window{Top: &top})
		s.must(err)
		cfg.Disk = append(append([]machine.Layer(nil), cfg.Disk...), top)
	}
	s.must(r.Close())
	r, err := s.Hypervisor.Adopt(s.ctx, cfg, r.Process())
	s.must(err)
	s.endWithTest(r)
	top := s.Overlay(s.t)
	_, err = s.window(r, machine.Window{Top: &top})
	s.must(err)
	s.wantRunning(r, true)
}

func (s *suite) windowFails() {
	r := s.launch(s.Config(s.t))
	s.must(r.Resume(s.ctx))
	good := s.Overlay(s.t)
	junk := machine.Layer{ID: good.ID, Path: good.Path + ".junk", Format: good.Format}
	s.must(os.WriteFile(junk.Path, []byte(strings.Repeat("junk", 1000)), 0o600))
	if _, err := s.window(r, machine.Window{Top: &junk}); err == nil {
		s.t.Error("a window with a junk layer worked")
	}
	s.wantRunning(r, true)
	broken := errors.New("pages are broken")
	for _, w := range []machine.Window{{}, {StayPaused: true}} { // an error outweighs StayPaused
		w.Pages = func(context.Context) error { return broken }
		if _, err := s.window(r, w); !errors.Is(err, broken) || strings.Contains(err.Error(), "\n") {
			s.t.Errorf("window with broken pages: %v", err)
		}
		s.wantRunning(r, true)
	}
	s.must(r.Pause(s.ctx))
	if _, err := s.window(r, machine.Window{WasPaused: true, Pages: func(context.Context) error { return broken }}); !errors.Is(err, broken) {
		s.t.Errorf("window of a paused run with broken pages: %v", err)
	}
	s.wantRunning(r, false)
	s.must(r.Resume(s.ctx))
	_, err := s.window(r, machine.Window{Top: &good}) // under the same id
	s.must(err)
	s.awaitWrites(r)
}

// windowTracked keeps a copy of the memory by what was reported as written,
// and compares it with the memory itself.
func (s *suite) windowTracked() {
	cfg := s.Config(s.t)
	r := s.launch(cfg)
	m := s.memory(r)
	defer func() { s.must(m.Close()) }()
	copied := make([]byte, cfg.MemoryBytes)
	bring := func(set *dirty.Set, err error) error {
		if err != nil {
			return err
		}
		for offset, length := range set.Runs() {
			if _, err := m.ReadAt(copied[offset:offset+length], offset); err != nil {
				return err
			}
		}
		return nil
	}
	s.must(bring(m.Arm()))
	s.must(r.Resume(s.ctx))
	for range 4 {
		if m.Strategy().Live() {
			s.must(bring(m.Scan()))
		}
		var wrong []int64
		_, err := s.window(r, machine.Window{Pages: func(context.Context) error {
			err := bring(m.Scan())
			if err != nil {
				return err
			}
			wrong, err = compare(m, bytes.NewReader(copied), cfg.MemoryBytes)
			return err
		}})
		s.must(err)
		if len(wrong) > 0 {
			s.t.Fatalf("pages %v were written and not reported", wrong)
		}
	}
	s.wantRunning(r, true)
}

func (s *suite) windowEnded() {
	r := s.launch(s.Config(s.t))
	s.must(r.Resume(s.ctx))
	s.must(r.Kill(s.ctx))
	_, err := s.window(r, machine.Window{})
	s.wantKind("window of an ended run", err, errdefs.WrongState)
	_, err = r.Memory(s.ctx)
	s.wantKind("memory of an ended run", err, errdefs.WrongState)
}

func (s *suite) killedInWindow() {
	r := s.launch(s.Config(s.t))
	s.must(r.Resume(s.ctx))
	top := s.Overlay(s.t)
	_, err := s.window(r, machine.Window{Top: &top, Pages: func(context.Context) error { return r.Kill(s.ctx) }})
	s.wantKind("window of a run that was killed in it", err, errdefs.WrongState)
	s.awaitExit(r, machine.Killed)
}
