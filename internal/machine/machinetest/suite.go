package machinetest

import (
	"context"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Fixture is what Suite needs to know of an implementation.
type Fixture struct {
	Hypervisor machine.Hypervisor
	// Config returns the configuration of a new run, with folders of its own
	// and a disk of one image and one empty overlay. The guest need not do
	// anything else than to write to its memory now and then as long as it
	// runs, and must not end by itself.
	Config func(t *testing.T) machine.RunConfig
	// Overlay makes an empty overlay for that disk.
	Overlay func(t *testing.T) machine.Layer
}

// suiteLimit bounds each test of the suite.
const suiteLimit = 3 * time.Minute

// suite is one test's share of a Fixture.
type suite struct {
	Fixture
	t   *testing.T
	ctx context.Context
}

// Suite is what every machine.Hypervisor must do. It leaves no process.
func Suite(t *testing.T, fx Fixture) {
	tests := map[string]func(*suite){
		"launch is stopped":                   (*suite).launchIsStopped,
		"pause and resume":                    (*suite).pauseAndResume,
		"link, one after another":             (*suite).linkOneAfterAnother,
		"switch disk":                         (*suite).switchDisk,
		"failed switch leaves the top":        (*suite).failedSwitch,
		"a disk is switched at rest":          (*suite).switchAtRest,
		"replace layers":                      (*suite).replaceLayers,
		"raw disk":                            (*suite).rawDisk,
		"no stall":                            (*suite).noStall,
		"kill":                                (*suite).kill,
		"killed from outside":                 (*suite).killedFromOutside,
		"launch error leaves nothing":         (*suite).launchErrorLeavesNothing,
		"cancelled launch leaves nothing":     (*suite).cancelledLaunchLeavesNothing,
		"adopt":                               (*suite).adopt,
		"adopted run's exit":                  (*suite).adoptedExit,
		"adopt a process that is not there":   (*suite).adoptGone,
		"methods at the same time":            (*suite).concurrent,
		"methods in flight at the exit":       (*suite).inFlight,
		"two runs do not know of one another": (*suite).twoRuns,
	}
	maps.Copy(tests, fullTests())
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), suiteLimit)
			t.Cleanup(cancel)
			test(&suite{fx, t, ctx})
		})
	}
}

func (s *suite) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *suite) wantKind(what string, err error, kind errdefs.Kind) {
	s.t.Helper()
	if !errdefs.Is(err, kind) {
		s.t.Errorf("%s: error is %v, want one of kind %s", what, err, kind)
	}
	if err != nil && strings.Contains(err.Error(), "\n") {
		s.t.Errorf("%s: error has several lines: %q", what, err)
	}
}

func (s *suite) wantRunning(r machine.Run, want bool) {
	s.t.Helper()
	got, err := r.Running(s.ctx)
	s.must(err)
	if got != want {
		s.t.Errorf("running is %v, want %v", got, want)
	}
}

// launch begins a run that ends with the test.
func (s *suite) launch(cfg machine.RunConfig) machine.Run {
	s.t.Helper()
	r, err := s.Hypervisor.Launch(s.ctx, cfg)
	s.must(err)
	s.endWithTest(r)
	return r
}

func (s *suite) endWithTest(r machine.Run) {
	s.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), suiteLimit)
		defer cancel()
		if err := r.Kill(ctx); err != nil && !errdefs.Is(err, errdefs.WrongState) {
			s.t.Errorf("kill at the end: %v", err)
		}
		if err := r.Close(); err != nil {
			s.t.Errorf("close at the end: %v", err)
		}
	})
}

func (s *suite) awaitExit(r machine.Run, reasons ...machine.ExitReason) {
	s.t.Helper()
	select {
	case <-r.Exited():
	case <-s.ctx.Done():
		s.t.Fatal("the exit was not proven")
	}
	for _, reason := range reasons {
		if r.Exit().Reason == reason {
			return
		}
	}
	s.t.Errorf("exit is %+v, want one of %v", r.Exit(), reasons)
}

func (s *suite) launchIsStopped() {
	r := s.launch(s.Config(s.t))
	s.wantRunning(r, false)
	p := r.Process()
	if p.PID <= 1 || p.StartTime == 0 || p.BootID == "" {
		s.t.Errorf("process is %+v", p)
	}
	select {
	case <-r.Exited():
		s.t.Error("it has exited")
	default:
	}
	s.must(r.Pause(s.ctx))
	s.wantRunning(r, false)
}

func (s *suite) pauseAndResume() {
	r := s.launch(s.Config(s.t))
	for range 3 {
		s.must(r.Resume(s.ctx))
		s.wantRunning(r, true)
		s.must(r.Resume(s.ctx))
		s.wantRunning(r, true)
		s.must(r.Pause(s.ctx))
		s.wantRunning(r, false)
		s.must(r.Pause(s.ctx))
		s.wantRunning(r, false)
	}
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	s.wantKind("pause, cancelled", r.Pause(ctx), errdefs.Interrupted)
	s.must(r.Resume(s.ctx))
	s.wantRunning(r, true)
}

func (s *suite) linkOneAfterAnother() {
	r := s.launch(s.Config(s.t))
	s.must(r.Resume(s.ctx))
	for range 3 {
		c, err := r.DialLink(s.ctx)
		s.must(err)
		// Bytes are taken, whether or not a guest reads them.
		s.must(c.SetDeadline(time.Now().Add(suiteLimit)))
		_, err = c.Write([]byte("hello"))
		s.must(err)
		s.must(c.Close())
	}
	s.wantRunning(r, true)
}

// noStall checks that pauses and switches of the disk are none, and that
// waiting for one ends with the wait and with the run.
func (s *suite) noStall() {
	r := s.launch(s.Config(s.t))
	s.must(r.Resume(s.ctx))
	waited := make(chan error, 1)
	go func() { waited <- r.AwaitStall(s.ctx) }()
	s.must(r.Pause(s.ctx))
	s.must(r.SwitchDisk(s.ctx, s.Overlay(s.t)))
	ctx, cancel := context.WithTimeout(s.ctx, 100*time.Millisecond)
	defer cancel()
	if err := r.AwaitStall(ctx); err == nil || ctx.Err() == nil {
		s.t.Errorf("a paused run has stalled: %v", err)
	}
	s.must(r.Resume(s.ctx))
	s.must(r.Kill(s.ctx))
	s.wantKind("stall of a run that ends", <-waited, errdefs.WrongState)
}

func (s *suite) kill() {
	r := s.launch(s.Config(s.t))
	s.must(r.Resume(s.ctx))
	s.must(r.Kill(s.ctx))
	s.awaitExit(r, machine.Killed)
	s.afterExit(r)
	s.must(r.Close())
	s.must(r.Close())
}

// afterExit checks that every method refuses.
func (s *suite) afterExit(r machine.Run) {
	s.t.Helper()
	_, running := r.Running(s.ctx)
	_, dial := r.DialLink(s.ctx)
	for what, err := range map[string]error{
		"pause": r.Pause(s.ctx), "resume": r.Resume(s.ctx), "running": running, "dial": dial,
		"stall": r.AwaitStall(s.ctx), "switch": r.SwitchDisk(s.ctx, s.Overlay(s.t)), "kill": r.Kill(s.ctx),
		"replace": r.ReplaceLayers(s.ctx, []machine.Layer{s.Overlay(s.t), s.Overlay(s.t), s.Overlay(s.t)}, 1, 2, s.Overlay(s.t)),
	} {
		s.wantKind(what+" after exit", err, errdefs.WrongState)
	}
}

func (s *suite) killedFromOutside() {
	r := s.launch(s.Config(s.t))
	s.must(r.Resume(s.ctx))
	p, err := os.FindProcess(r.Process().PID)
	s.must(err)
	s.must(p.Kill())
	s.awaitExit(r, machine.Crashed)
	s.afterExit(r)
}

// left is what is in the run's folders.
func (s *suite) left(cfg machine.RunConfig) (names []string) {
	s.t.Helper()
	for _, dir := range []string{cfg.Dir, cfg.SocketDir} {
		entries, err := os.ReadDir(dir)
		s.must(err)
		for _, e := range entries {
			names = append(names, filepath.Join(dir, e.Name()))
		}
	}
	return names
}

func (s *suite) launchErrorLeavesNothing() {
	cfg := s.Config(s.t)
	before := s.left(cfg)
	bad := cfg
	bad.Disk = append([]machine.Layer(nil), cfg.Disk...)
	top := &bad.Disk[len(bad.Disk)-1]
	top.Path += ".junk"
	s.must(os.WriteFile(top.Path, []byte(strings.Repeat("junk", 1000)), 0o600))
	for range 2 {
		_, err := s.Hypervisor.Launch(s.ctx, bad)
		if err == nil {
			s.t.Fatal("launch with a broken disk worked")
		}
		if strings.Contains(err.Error(), "\n") {
			s.t.Errorf("error has several lines: %q", err)
		}
	}
	if after := s.left(cfg); len(after) != len(before) {
		s.t.Errorf("left %v, before %v", after, before)
	}
	s.launch(cfg) // the folder and the disk are free
}

func (s *suite) cancelledLaunchLeavesNothing() {
	cfg := s.Config(s.t)
	before := s.left(cfg)
	for _, limit := range []time.Duration{0, 5 * time.Millisecond, 30 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(s.ctx, limit)
		r, err := s.Hypervisor.Launch(ctx, cfg)
		cancel()
		if err == nil { // it was that fast
			s.must(r.Kill(s.ctx))
			s.must(r.Close())
			continue
		}
		s.wantKind("launch, cancelled", err, errdefs.Deadline)
		if after := s.left(cfg); len(after) != len(before) {
			s.t.Errorf("left %v, before %v", after, before)
		}
	}
	s.launch(cfg)
}

func (s *suite) concurrent() {
	r := s.launch(s.Config(s.t))
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 5 {
				var err error
				switch i % 4 {
				case 0:
					err = r.Pause(s.ctx)
				case 1:
					err = r.Resume(s.ctx)
				case 2:
					_, err = r.Running(s.ctx)
				case 3:
					var c net.Conn
					if c, err = r.DialLink(s.ctx); err == nil {
						err = c.Close()
					}
				}
				if err != nil {
					s.t.Errorf("method %d: %v", i%4, err)
				}
			}
		})
	}
	wg.Wait()
	s.must(r.Pause(s.ctx))
	s.wantRunning(r, false)
}

func (s *suite) inFlight() {
	r := s.launch(s.Config(s.t))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				err := r.Pause(s.ctx)
				if err == nil {
					err = r.Resume(s.ctx)
				}
				if err != nil {
					s.wantKind("method at the exit", err, errdefs.WrongState)
					return
				}
			}
		})
	}
	for range 2 {
		wg.Go(func() {
			if err := r.Kill(s.ctx); err != nil {
				s.wantKind("second kill", err, errdefs.WrongState)
			}
		})
	}
	wg.Wait()
	s.awaitExit(r, machine.Killed)
}

func (s *suite) twoRuns() {
	a, b := s.launch(s.Config(s.t)), s.launch(s.Config(s.t))
	s.must(a.Resume(s.ctx))
	s.must(b.Resume(s.ctx))
	s.must(a.Kill(s.ctx))
	s.wantRunning(b, true)
	select {
	case <-b.Exited():
		s.t.Error("the other run ended too")
	default:
	}
}
