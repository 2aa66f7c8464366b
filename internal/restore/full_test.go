package restore_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/capture/capturetest"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
	"github.com/holdpoint/holdpoint/internal/store"
)

// newFullScene is a scene whose target is a full checkpoint; the guest has
// changed its memory since.
func newFullScene(t *testing.T) *scene {
	t.Helper()
	w := capturetest.New(t)
	w.Source.Write(1, 1)
	w.Source.Write(2, 2)
	result, err := w.Capturer.Full(t.Context(), w.FullRequest(durable.NewID(), "before"))
	if err != nil {
		t.Fatal(err)
	}
	w.Source.Write(2, 9)
	w.Source.Write(3, 9)
	w.Source.Done, w.Phases = nil, nil
	return &scene{
		World: w, target: result.Checkpoint, destination: &destination{world: w, alive: map[string]bool{}}, restorer: newRestorer(w),
	}
}

// targetMemory is the memory of a full scene's target.
func targetMemory() map[int64]byte { return map[int64]byte{1: 1, 2: 2} }

func (s *scene) fullRequest() restore.FullRequest {
	r := s.request()
	r.Capture, r.Note = s.Source, s.Note
	return restore.FullRequest{DiskRequest: r, Host: s.destination}
}

// standby records a standby of the target and returns its run id and layer.
func (s *scene) standby(t *testing.T) (runID, layerID string) {
	t.Helper()
	layer, err := s.Capturer.NewLayer(t.Context(), s.Machine.ID, s.Machine.Spec.DiskBytes)
	if err != nil {
		t.Fatal(err)
	}
	runID = durable.NewID()
	s.destination.alive[runID] = true
	err = errors.Join(s.Catalog.AddLayer(t.Context(), s.Operation, layer), s.Catalog.AddStandby(t.Context(), catalog.Standby{
		RunID: runID, CheckpointID: s.target.ID, LayerID: layer.ID,
	}))
	if err != nil {
		t.Fatal(err)
	}
	return runID, layer.ID
}

// next admits the operation that follows.
func (s *scene) next(t *testing.T) {
	t.Helper()
	err := s.Catalog.Finish(t.Context(), s.Operation, catalog.Outcome{State: catalog.OperationDone})
	if err == nil {
		err = s.Capturer.Sweep(t.Context())
	}
	if err == nil {
		s.Operation = durable.NewID()
		_, _, err = s.Catalog.Admit(t.Context(), catalog.Operation{ID: s.Operation, RequestID: s.Operation, Verb: "test"}, 1<<40)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestFullRestore(t *testing.T) {
	s := newFullScene(t)
	before, discarded := s.Chain(), s.Source.Memory()
	result, err := s.restorer.Full(t.Context(), s.fullRequest())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(targetMemory(), s.destination.loaded); diff != "" {
		t.Errorf("memory of the new run (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"capture", "kill"}, s.Source.Done); diff != "" {
		t.Errorf("done to the source (-want +got):\n%s", diff)
	}
	safety := result.Safety
	if safety == nil || safety.Kind != checkpoint.Full || !safety.Automatic || !slices.Equal(safety.Layers, before) {
		t.Fatalf("safety %+v, want the layers %v", safety, before)
	}
	if diff := cmp.Diff(discarded, s.MemoryOf(*safety)); diff != "" {
		t.Errorf("memory of the safety checkpoint (-want +got):\n%s", diff)
	}
	if result.From != restore.FromLayers || result.Running == 0 || result.Answer <= result.Running || result.ClosedSockets != 3 || result.Downtime == 0 {
		t.Errorf("result %+v", result)
	}
	m, chain := s.Now(), s.Chain()
	if m.Head != s.target.ID || m.MemoryHead != s.target.ID || m.MemoryFile != s.target.Full.Memory[0] || m.Generation != 2 || m.State != machine.Running {
		t.Errorf("machine %+v", m)
	}
	if !slices.Equal(chain, s.destination.chain) || !slices.Equal(chain[:len(chain)-1], s.target.Layers) {
		t.Errorf("chain %v, run on %v", chain, s.destination.chain)
	}
	if l := s.destination.launch; l.Incoming.Checkpoint != s.target.ID || l.Standby || l.RunID != m.RunID {
		t.Errorf("launch %+v", l)
	}
	// The memory file is there now, and the safety checkpoint undoes it all.
	s.next(t)
	r := s.fullRequest()
	r.Source, r.Capture, r.NoSafety, r.Target = nil, nil, true, *safety
	if result, err = s.restorer.Full(t.Context(), r); err != nil || result.From != restore.FromLayers {
		t.Fatalf("undo: %+v, %v", result, err)
	}
	if diff := cmp.Diff(discarded, s.destination.loaded); diff != "" {
		t.Errorf("memory after the undo (-want +got):\n%s", diff)
	}
	s.next(t)
	r = s.fullRequest()
	r.Source, r.Capture, r.NoSafety = nil, nil, true
	if result, err = s.restorer.Full(t.Context(), r); err != nil || result.From != restore.FromMemoryFile {
		t.Errorf("again: %+v, %v", result, err)
	}
}

func TestFullRestoreFromStandby(t *testing.T) {
	for _, bad := range []bool{false, true} {
		s := newFullScene(t)
		runID, layer := s.standby(t)
		s.destination.badStandby = bad
		result, err := s.restorer.Full(t.Context(), s.fullRequest())
		if err != nil {
			t.Fatal(err)
		}
		m, chain := s.Now(), s.Chain()
		if used := m.RunID == runID && chain[len(chain)-1] == layer && result.From == restore.FromStandby; used == bad {
			t.Errorf("bad %v: run %s on %v from %s, the standby was %s on %s", bad, m.RunID, chain, result.From, runID, layer)
		}
		if bad && (s.destination.alive[runID] || len(s.Notes) == 0 || !slices.Contains(s.destination.done, "begin failed")) {
			t.Errorf("the bad standby lives: %v; notes %q", s.destination.alive, s.Notes)
		}
		if left, err := s.Catalog.Standbys(t.Context(), ""); err != nil || len(left) != 0 {
			t.Errorf("standbys %v, %v", left, err)
		}
		s.next(t)
		checkFiles(t, s)
	}
}

// TestDamagedMemoryFile: what was made of the layers is made anew when nothing
// goes on from it.
func TestDamagedMemoryFile(t *testing.T) {
	s := newFullScene(t)
	file, release, err := s.Memory.Open(t.Context(), s.target)
	if err != nil {
		t.Fatal(err)
	}
	release()
	if err := os.Chmod(file.Path, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(file.Path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{spoilt}, store.PageSize); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	result, err := s.restorer.Full(t.Context(), s.fullRequest())
	if err != nil || result.From != restore.FromLayers || !slices.Contains(s.destination.done, "begin failed") {
		t.Errorf("%+v, %v; done %q", result, err, s.destination.done)
	}
	if !slices.ContainsFunc(s.Notes, func(n string) bool { return strings.Contains(n, "was damaged") }) {
		t.Errorf("notes %q", s.Notes)
	}
	s.next(t)
	checkFiles(t, s)
}

func TestRefusedFullRestores(t *testing.T) {
	tests := map[string]struct {
		prepare func(*testing.T, *scene, *restore.FullRequest)
		kind    errdefs.Kind
		names   string
	}{
		"disk checkpoint": {
			func(t *testing.T, s *scene, r *restore.FullRequest) {
				r.Target.Kind, r.Target.Full = checkpoint.Disk, nil
			}, errdefs.KindMismatch, "--disk",
		},
		"another CPU": {
			func(t *testing.T, s *scene, r *restore.FullRequest) { s.destination.differs = true }, errdefs.Incompatible, "CPU model",
		},
		"another machine's": {
			func(t *testing.T, s *scene, r *restore.FullRequest) { r.Target.MachineID = durable.NewID() }, errdefs.Invalid, "holdpoint fork",
		},
		"damaged memory": {
			func(t *testing.T, s *scene, r *restore.FullRequest) { damage(t, s, s.target.Full.Memory[0]) }, errdefs.Storage, "memory",
		},
		"no devices": {
			func(t *testing.T, s *scene, r *restore.FullRequest) { damage(t, s, s.target.Full.Devices) }, errdefs.Storage, "devices",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newFullScene(t)
			r := s.fullRequest()
			test.prepare(t, s, &r)
			chain := s.Chain()
			_, err := s.restorer.Full(t.Context(), r)
			if !errdefs.Is(err, test.kind) || !strings.Contains(err.Error(), test.names) {
				t.Errorf("error %v (%s), want %s naming %s", err, errdefs.KindOf(err), test.kind, test.names)
			}
			if len(s.Source.Done) != 0 || len(s.destination.done) != 0 || len(s.Phases) != 0 || !slices.Equal(chain, s.Chain()) {
				t.Errorf("done %v, %v, phases %v", s.Source.Done, s.destination.done, s.Phases)
			}
			s.next(t)
			checkFiles(t, s)
		})
	}
}

// damage changes one byte of a layer that nothing but a look at all of it shows.
func damage(t *testing.T, s *scene, layerID string) {
	t.Helper()
	layers, err := s.Catalog.GetLayers(t.Context(), layerID)
	if err != nil {
		t.Fatal(err)
	}
	path := s.Capturer.Path(layers[0])
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if data[70%len(data)] ^= 1; layers[0].Format == catalog.DevicesFormat {
		data = data[:3]
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, data, 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestFailedRestoreLetsTheCapturedSourceGoOn(t *testing.T) {
	tests := map[string]struct {
		prepare func(*scene, *restore.FullRequest)
		done    []string
	}{
		"kept whole": {
			func(*scene, *restore.FullRequest) {}, []string{"capture", "published, resumed"},
		},
		"paused by its user": {
			func(s *scene, r *restore.FullRequest) { r.Paused = true }, []string{"capture", "published"},
		},
		"memory cannot be kept": {
			func(s *scene, r *restore.FullRequest) { s.Source.Fails = map[string]bool{"capture": true} },
			[]string{"capture failed", "taken back, resumed, unknown", "stop", "boot"},
		},
		"memory is lost late": {
			func(s *scene, r *restore.FullRequest) { s.Source.Fails = map[string]bool{"stage": true, "stop": true} },
			[]string{"capture", "taken back, resumed", "stop failed", "pause", "switch", "resume"},
		},
	}
	for name, test := range tests {
		for _, disk := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				s := newFullScene(t)
				s.destination.fails = true
				r := s.fullRequest()
				test.prepare(s, &r)
				var err error
				if disk {
					_, err = s.restorer.Disk(t.Context(), r.DiskRequest)
				} else {
					_, err = s.restorer.Full(t.Context(), r)
				}
				if !errors.Is(err, capturetest.ErrSource) {
					t.Fatalf("error %v", err)
				}
				if diff := cmp.Diff(test.done, s.Source.Done); diff != "" {
					t.Errorf("done to the source (-want +got):\n%s", diff)
				}
				if !s.Source.Running() && !r.Paused || s.Now().Generation != 1 {
					t.Errorf("source runs: %v; machine %+v", s.Source.Running(), s.Now())
				}
				s.Source.Fails = nil
				s.next(t)
				checkFiles(t, s)
				after, err := s.Capturer.Full(t.Context(), s.FullRequest(durable.NewID(), "after"))
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(s.Source.Memory(), s.MemoryOf(after.Checkpoint)); diff != "" {
					t.Errorf("memory of the next checkpoint (-want +got):\n%s", diff)
				}
			})
		}
	}
}

func TestRestoreOfASuspendedMachine(t *testing.T) {
	for _, disk := range []bool{true, false} {
		s := newFullScene(t)
		head := s.suspend(t)
		s.next(t)
		r := s.fullRequest()
		r.Source, r.Capture = nil, nil
		var result restore.DiskResult
		var err error
		if disk {
			result, err = s.restorer.Disk(t.Context(), r.DiskRequest)
		} else {
			var full restore.FullResult
			full, err = s.restorer.Full(t.Context(), r)
			result = full.DiskResult
		}
		if err != nil || result.Safety == nil || result.Safety.ID != head {
			t.Fatalf("%+v, %v; the head was %s", result, err, head)
		}
		if m := s.Now(); m.Head != s.target.ID || m.State != machine.Running || (m.MemoryHead == s.target.ID) == disk {
			t.Errorf("machine %+v", m)
		}
	}
}

// A crash before any step leaves the machine as it was, with a source that can
// go on, or restored.
func TestFullRestoreCrashAtEveryStep(t *testing.T) {
	for k := 0; ; k++ {
		s := newFullScene(t)
		memory := s.Source.Memory()
		r := s.fullRequest()
		var detail restore.Detail
		r.Enter = func(ctx context.Context, phase, text string, d any) error {
			err := s.Enter(ctx, phase, text, d)
			if err == nil {
				detail = d.(restore.Detail)
			}
			return err
		}
		crashed := durabletest.CrashAfter(s.Files, k)
		_, err := s.restorer.Full(t.Context(), r)
		if !crashed() {
			if err != nil || k < 20 {
				t.Fatalf("ended after %d steps: %v", k, err)
			}
			return
		}
		s.Files.Before = nil
		s.Reopen()
		m := s.Now()
		if m.RunID == detail.Run && detail.Run != "" {
			if chain := s.Chain(); m.Generation != 2 || m.MemoryHead != s.target.ID || !slices.Equal(chain[:len(chain)-1], s.target.Layers) {
				t.Errorf("step %d: restored, but the machine is %+v on %v", k, m, chain)
			}
			continue
		}
		if detail.Safety != nil {
			if _, err := s.Capturer.SettleFull(t.Context(), m, *detail.Safety, s.Source, true); err != nil {
				t.Fatalf("step %d: %v", k, err)
			}
		}
		if !s.Source.Running() || m.Generation != 1 {
			t.Errorf("step %d: source runs: %v, machine %+v", k, s.Source.Running(), m)
		}
		if err := s.RemoveUnknown(); err != nil {
			t.Fatal(err)
		}
		s.next(t)
		checkFiles(t, s)
		after, err := s.Capturer.Full(t.Context(), s.FullRequest(durable.NewID(), "after"))
		if err != nil {
			t.Fatalf("step %d: %v", k, err)
		}
		if diff := cmp.Diff(memory, s.MemoryOf(after.Checkpoint)); diff != "" {
			t.Errorf("step %d: memory of the next checkpoint (-want +got):\n%s", k, diff)
		}
	}
}

// suspend suspends the machine and returns its head.
func (s *scene) suspend(t *testing.T) string {
	t.Helper()
	result, err := s.restorer.Suspend(t.Context(), s.suspendRequest())
	if err != nil {
		t.Fatal(err)
	}
	return result.Checkpoint.ID
}

func (s *scene) suspendRequest() restore.SuspendRequest {
	return restore.SuspendRequest{Checkpoint: s.FullRequest(durable.NewID(), ""), Run: s.Source}
}
