package restore_test

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/capture/capturetest"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

var update = flag.Bool("update", false, "write the golden files anew")

// spoilt is at the beginning of page 1 of a memory with which no guest goes on.
const spoilt = 0xee

// destination is the double of the runs that are begun.
type destination struct {
	world *capturetest.World
	// fails: no run comes up; badStandby: a standby does not.
	fails, badStandby bool
	// differs makes this host another one than the checkpoint's.
	differs bool
	chain   []string
	launch  restore.Launch
	machine catalog.Machine
	// loaded is the memory of the last run that was begun.
	loaded map[int64]byte
	// alive are the runs that live.
	alive map[string]bool
	done  []string
}

func (d *destination) Platform(_ context.Context, m catalog.Machine) (machine.Platform, error) {
	p := d.world.Platform(m.Spec)
	if d.differs {
		p.CPU = "Haswell"
	}
	return p, nil
}

func (d *destination) Begin(_ context.Context, m catalog.Machine, l restore.Launch) (restore.Begun, error) {
	if d.fails || d.badStandby && l.Standby {
		d.done = append(d.done, "begin failed")
		delete(d.alive, l.RunID)
		return restore.Begun{}, capturetest.ErrSource
	}
	d.chain, d.launch, d.machine = nil, l, m
	for _, layer := range l.Chain {
		d.chain = append(d.chain, layer.ID)
	}
	d.loaded = nil
	if l.Incoming != nil {
		d.loaded = d.world.FirstBytes(l.Incoming.MemoryFile)
		if d.loaded[1] == spoilt {
			d.done = append(d.done, "begin failed")
			delete(d.alive, l.RunID)
			return restore.Begun{}, capturetest.ErrSource
		}
		if state, err := os.ReadFile(l.Incoming.DeviceState); err != nil || len(state) == 0 {
			return restore.Begun{}, errors.Join(err, capturetest.ErrSource)
		}
	}
	d.done = append(d.done, "begin")
	d.alive[l.RunID] = true
	return restore.Begun{Running: time.Millisecond, Answer: 2 * time.Millisecond, ClosedSockets: 3, Note: "begun"}, nil
}

// Replace does what the keeper does.
func (d *destination) Replace(ctx context.Context, m catalog.Machine, _ string) error {
	d.done = append(d.done, "replace")
	return d.world.Catalog.SetMachineState(ctx, m.ID, machine.Running)
}

func (d *destination) End(_ context.Context, _, runID string) error {
	d.done = append(d.done, "end")
	delete(d.alive, runID)
	return nil
}

// scene is a world with a checkpoint and a machine that went on from it.
type scene struct {
	*capturetest.World
	restorer    *restore.Restorer
	target      checkpoint.Checkpoint
	destination *destination
}

func newScene(t *testing.T) *scene {
	t.Helper()
	w := capturetest.New(t)
	done, err := w.Capturer.Stopped(t.Context(), capture.StoppedRequest{
		Machine: w.Machine, Source: w.Source, Enter: w.Enter,
		Checkpoint: checkpoint.Checkpoint{ID: durable.NewID(), Name: "before", Routes: []checkpoint.Route{{Host: "app.localhost", Port: 8080}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Catalog.PutRoute(t.Context(), catalog.Route{Host: "app.localhost", MachineID: w.Machine.ID, Port: 9090}); err != nil {
		t.Fatal(err)
	}
	w.Source.Done, w.Phases = nil, nil
	return &scene{
		World: w, target: done.Checkpoint, destination: &destination{world: w, alive: map[string]bool{}},
		restorer: newRestorer(w),
	}
}

func newRestorer(w *capturetest.World) *restore.Restorer {
	return restore.New(restore.Config{Catalog: w.Catalog, Capturer: w.Capturer, Memory: w.Memory})
}

func (s *scene) request() restore.DiskRequest {
	return restore.DiskRequest{
		Operation: s.Operation, Machine: s.Now(), Target: s.target, Source: s.Source, Destination: s.destination,
		Enter: s.Enter, Note: func(string, ...any) {},
	}
}

func TestDiskRestore(t *testing.T) {
	s := newScene(t)
	before := s.Chain()
	transcript := durabletest.Record(s.Files, s.Home.Dir())
	r := s.request()
	r.PutBack = true
	result, err := s.restorer.Disk(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "disk.golden")
	if *update {
		if err := os.WriteFile(path, []byte(transcript.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), transcript.String()); diff != "" {
		t.Errorf("state writes (-want +got):\n%s", diff)
	}
	if result.Safety == nil || result.Safety.Consistency != checkpoint.Stopped || !slices.Equal(result.Safety.Layers, before) {
		t.Errorf("safety %+v, want the layers %v", result.Safety, before)
	}
	m := s.Now()
	if m.Head != s.target.ID || m.Generation != 2 || result.Generation != 2 {
		t.Errorf("machine %+v", m)
	}
	chain := s.Chain()
	if !slices.Equal(chain, s.destination.chain) || !slices.Equal(chain[:len(chain)-1], s.target.Layers) {
		t.Errorf("chain %v, run on %v", chain, s.destination.chain)
	}
	if route, err := s.Catalog.GetRoute(t.Context(), "app.localhost"); err != nil || route.Port != 8080 {
		t.Errorf("route %+v, %v", route, err)
	}
}

func TestRestoreWithoutSafetyKillsTheSourceLast(t *testing.T) {
	s := newScene(t)
	r := s.request()
	r.NoSafety = true
	result, err := s.restorer.Disk(t.Context(), r)
	if err != nil || result.Safety != nil {
		t.Fatalf("%+v, %v", result, err)
	}
	if diff := cmp.Diff([]string{"pause", "kill"}, s.Source.Done); diff != "" {
		t.Errorf("done to the source (-want +got):\n%s", diff)
	}
}

func TestSafetyOfAGuestThatDoesNotStop(t *testing.T) {
	tests := map[string]struct {
		fails map[string]bool
		done  []string
	}{
		"paused":          {map[string]bool{"stop": true}, []string{"stop failed", "pause", "switch", "kill"}},
		"not even paused": {map[string]bool{"stop": true, "pause": true}, []string{"stop failed", "pause failed", "kill"}},
		"disk not switched": {
			map[string]bool{"stop": true, "switch": true},
			[]string{"stop failed", "pause", "switch failed", "kill"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			s.Source.Fails = test.fails
			result, err := s.restorer.Disk(t.Context(), s.request())
			if err != nil {
				t.Fatal(err)
			}
			if result.Safety == nil || result.Safety.Consistency != checkpoint.Crash {
				t.Errorf("safety %+v", result.Safety)
			}
			if diff := cmp.Diff(test.done, s.Source.Done); diff != "" {
				t.Errorf("done to the source (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFailedRestoreLetsTheSourceGoOn(t *testing.T) {
	tests := map[string]struct {
		prepare func(*scene, *restore.DiskRequest)
		running bool
		done    []string
	}{
		"source was stopped": {
			func(*scene, *restore.DiskRequest) {}, true, []string{"stop", "boot"},
		},
		"source was paused by us": {
			func(_ *scene, r *restore.DiskRequest) { r.NoSafety = true }, true, []string{"pause", "resume"},
		},
		"source goes on with the new top": {
			func(s *scene, _ *restore.DiskRequest) { s.Source.Fails = map[string]bool{"stop": true} },
			true,
			[]string{"stop failed", "pause", "switch", "resume"},
		},
		"machine was stopped": {
			func(s *scene, r *restore.DiskRequest) { r.Source = nil }, true, nil,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			s.destination.fails = true
			r := s.request()
			test.prepare(s, &r)
			_, err := s.restorer.Disk(t.Context(), r)
			if !errors.Is(err, capturetest.ErrSource) {
				t.Fatalf("error %v", err)
			}
			if diff := cmp.Diff(test.done, s.Source.Done); diff != "" {
				t.Errorf("done to the source (-want +got):\n%s", diff)
			}
			if s.Source.Running() != test.running {
				t.Errorf("source runs: %v", s.Source.Running())
			}
			if m := s.Now(); m.Generation != 1 {
				t.Errorf("generation %d", m.Generation)
			}
			s.Chain()
			if err := s.Catalog.Finish(t.Context(), s.Operation, catalog.Outcome{State: catalog.OperationFailed, Err: err}); err != nil {
				t.Fatal(err)
			}
			if err := s.Capturer.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			checkFiles(t, s)
		})
	}
}

// checkFiles holds that the layers' folder has what is recorded and no more.
func checkFiles(t *testing.T, s *scene) {
	t.Helper()
	layers, err := s.Catalog.ListLayers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(s.Home.Layers())
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != len(layers) {
		t.Errorf("%d files, %d recorded layers", len(entries), len(layers))
	}
}

// A crash before any step leaves the machine with the old chain or the new
// one, and every listed checkpoint whole.
func TestCrashAtEveryStep(t *testing.T) {
	for k := 0; ; k++ {
		s := newScene(t)
		old := s.Chain()
		durabletest.CrashAfter(s.Files, k)
		_, err := s.restorer.Disk(t.Context(), s.request())
		crashed := errors.Is(err, durabletest.ErrCrashed)
		s.Files.Before = nil
		s.Reopen()
		m, chain := s.Now(), s.Chain()
		if m.Generation == 1 && !slices.Equal(chain[:len(old)], old) {
			t.Errorf("step %d: not restored, but the chain is %v, was %v", k, chain, old)
		}
		if m.Generation == 2 && !slices.Equal(chain[:len(chain)-1], s.target.Layers) {
			t.Errorf("step %d: restored, but the chain is %v", k, chain)
		}
		if err := s.Catalog.BeginRun(t.Context(), m.ID, durable.NewID()); err != nil {
			t.Errorf("step %d: boot afterwards: %v", k, err)
		}
		list, listErr := s.Catalog.ListCheckpoints(t.Context(), m.ID)
		if listErr != nil || len(list) == 0 {
			t.Fatalf("step %d: checkpoints %v, %v", k, list, listErr)
		}
		for _, c := range list {
			if _, err := s.Catalog.GetLayers(t.Context(), c.Layers...); err != nil {
				t.Errorf("step %d: checkpoint %s: %v", k, c.ID, err)
			}
		}
		if !crashed {
			if err != nil || k < 10 {
				t.Fatalf("ended after %d steps: %v (%s)", k, err, errdefs.KindOf(err))
			}
			return
		}
	}
}
