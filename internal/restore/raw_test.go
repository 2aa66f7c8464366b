package restore_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/capture/capturetest"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/restore"
)

const spoiltDisk = "what the agent wrote"

// newRawScene is a scene whose machine has a raw disk, which was spoilt since the
// checkpoint.
func newRawScene(t *testing.T) *scene {
	t.Helper()
	w := capturetest.NewRaw(t)
	done, err := w.Capturer.Stopped(t.Context(), capture.StoppedRequest{
		Operation: w.Operation, Machine: w.Machine, Source: w.Source, Enter: w.Enter, Progress: func(int64, int64) {},
		Checkpoint: checkpoint.Checkpoint{ID: durable.NewID(), Name: "before"},
	})
	if err != nil {
		t.Fatal(err)
	}
	w.WriteRaw(spoiltDisk)
	w.Source.Done, w.Phases = nil, nil
	return &scene{
		World: w, target: done.Checkpoint, destination: &destination{world: w, alive: map[string]bool{}}, restorer: newRestorer(w),
	}
}

func (s *scene) rawRequest() restore.DiskRequest {
	r := s.request()
	r.Progress = func(int64, int64) {}
	return r
}

// TestRawDiskRestore: the checkpoint is copied back, what is discarded is kept,
// and the displaced disk stays until the operation ends.
func TestRawDiskRestore(t *testing.T) {
	tests := map[string]struct {
		prepare     func(*scene, *restore.DiskRequest)
		consistency checkpoint.Consistency
		done        []string
	}{
		"running":                     {func(*scene, *restore.DiskRequest) {}, checkpoint.Stopped, []string{"stop"}},
		"stopped":                     {func(_ *scene, r *restore.DiskRequest) { r.Source, r.WasClean = nil, true }, checkpoint.Stopped, nil},
		"paused by the user":          {func(_ *scene, r *restore.DiskRequest) { r.Paused = true }, checkpoint.Crash, []string{"kill"}},
		"a guest that does not stop":  {func(s *scene, _ *restore.DiskRequest) { s.Source.Fails = map[string]bool{"stop": true} }, checkpoint.Crash, []string{"stop failed", "pause", "kill"}},
		"one that cannot even paused": {func(s *scene, _ *restore.DiskRequest) { s.Source.Fails = map[string]bool{"stop": true, "pause": true} }, checkpoint.Crash, []string{"stop failed", "pause failed", "kill"}},
		"nothing is kept":             {func(_ *scene, r *restore.DiskRequest) { r.NoSafety = true }, "", []string{"pause", "kill"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newRawScene(t)
			before := s.Chain()
			r := s.rawRequest()
			test.prepare(s, &r)
			result, err := s.restorer.Disk(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.done, s.Source.Done); diff != "" {
				t.Errorf("done to the source (-want +got):\n%s", diff)
			}
			chain := s.Chain()
			if len(chain) != 1 || !slices.Equal(chain, s.destination.chain) || chain[0] == before[0] || chain[0] == s.target.Layers[0] {
				t.Fatalf("disk %v, run on %v; it was %v", chain, s.destination.chain, before)
			}
			if got := s.RawContent(chain[0]); got != capturetest.RawData {
				t.Errorf("the restored disk has %q", got)
			}
			switch {
			case test.consistency == "" && result.Safety != nil, test.consistency != "" && result.Safety == nil:
				t.Errorf("safety %+v", result.Safety)
			case result.Safety != nil && (result.Safety.Consistency != test.consistency || s.RawContent(result.Safety.Layers[0]) != spoiltDisk):
				t.Errorf("safety %+v has %q", result.Safety, s.RawContent(result.Safety.Layers[0]))
			}
			if displaced, err := s.Catalog.Displaced(t.Context(), s.Operation); err != nil || len(displaced) != 1 || displaced[0].ID != before[0] {
				t.Errorf("displaced %v, %v", displaced, err)
			}
			if err := s.Capturer.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := s.RawContent(before[0]); got != spoiltDisk {
				t.Errorf("the displaced disk has %q", got)
			}
			s.end(t, nil)
		})
	}
}

// end ends the operation, after which there is no file that nothing needs.
func (s *scene) end(t *testing.T, failure error) {
	t.Helper()
	out := catalog.Outcome{State: catalog.OperationDone}
	if failure != nil {
		out = catalog.Outcome{State: catalog.OperationFailed, Err: failure}
	}
	if err := s.Catalog.Finish(t.Context(), s.Operation, out); err != nil {
		t.Fatal(err)
	}
	if err := s.Capturer.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkFiles(t, s)
}

func TestFailedRawRestoreLetsTheSourceGoOn(t *testing.T) {
	tests := map[string]struct {
		prepare func(s *scene, r *restore.DiskRequest, cancel func())
		kind    errdefs.Kind
		done    []string
	}{
		"destination fails": {
			func(s *scene, _ *restore.DiskRequest, _ func()) { s.destination.fails = true }, errdefs.Internal, []string{"stop", "boot"},
		},
		"canceled while the checkpoint is copied": {
			func(_ *scene, r *restore.DiskRequest, cancel func()) { r.Progress = func(int64, int64) { cancel() } }, errdefs.Interrupted, nil,
		},
		"canceled while the discarded disk is copied": {
			func(s *scene, r *restore.DiskRequest, cancel func()) { s.Source.OnStop = cancel }, errdefs.Interrupted, []string{"stop", "boot"},
		},
		"paused by us": {
			func(s *scene, r *restore.DiskRequest, _ func()) { r.NoSafety, s.destination.fails = true, true },
			errdefs.Internal,
			[]string{"pause", "resume"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newRawScene(t)
			before := s.Chain()
			r := s.rawRequest()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			test.prepare(s, &r, cancel)
			_, err := s.restorer.Disk(ctx, r)
			if !errdefs.Is(err, test.kind) {
				t.Errorf("error %v (%s), want %s", err, errdefs.KindOf(err), test.kind)
			}
			if diff := cmp.Diff(test.done, s.Source.Done); diff != "" || !s.Source.Running() {
				t.Errorf("done to the source (-want +got):\n%s", diff)
			}
			if chain := s.Chain(); !slices.Equal(chain, before) || s.RawContent(chain[0]) != spoiltDisk {
				t.Errorf("the disk is %v, was %v", chain, before)
			}
			s.end(t, err)
		})
	}
}

// TestRawCrashAtEveryStep: a crash before any step leaves the machine with the
// old disk or the restored one, and every listed checkpoint whole.
func TestRawCrashAtEveryStep(t *testing.T) {
	for k := 0; ; k++ {
		s := newRawScene(t)
		old := s.Chain()
		durabletest.CrashAfter(s.Files, k)
		_, err := s.restorer.Disk(t.Context(), s.rawRequest())
		crashed := errors.Is(err, durabletest.ErrCrashed)
		s.Files.Before = nil
		s.Reopen()
		m, chain := s.Now(), s.Chain()
		want := spoiltDisk
		if m.Generation == 2 {
			want = capturetest.RawData
		}
		if got := s.RawContent(chain[0]); got != want || len(chain) != 1 || m.Generation == 1 && !slices.Equal(chain, old) {
			t.Errorf("step %d: generation %d has the disk %v with %q", k, m.Generation, chain, got)
		}
		if err := s.Catalog.BeginRun(t.Context(), m.ID, durable.NewID()); err != nil {
			t.Errorf("step %d: boot afterwards: %v", k, err)
		}
		list, listErr := s.Catalog.ListCheckpoints(t.Context(), m.ID)
		if listErr != nil || len(list) == 0 {
			t.Fatalf("step %d: checkpoints %v, %v", k, list, listErr)
		}
		for _, c := range list {
			content := map[bool]string{true: spoiltDisk, false: capturetest.RawData}[c.Automatic]
			if got := s.RawContent(c.Layers[0]); got != content {
				t.Errorf("step %d: checkpoint %s has %q", k, c.ID, got)
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

// TestRawFork: each fork has a copy of its own, and is a raw machine.
func TestRawFork(t *testing.T) {
	s := newRawScene(t)
	m := catalog.Machine{ID: durable.NewID(), Name: "try-1", Generation: 1, LinkMagic: s.Machine.LinkMagic}
	made, err := s.restorer.Fork(t.Context(), restore.ForkRequest{
		Operation: s.Operation, Target: s.target, Machine: m, Destination: s.destination, Host: s.destination,
		Note: func(string, ...any) {}, Progress: func(int64, int64) {},
	})
	if err != nil {
		t.Fatal(err)
	}
	chain, err := s.Catalog.Chain(t.Context(), m.ID)
	if err != nil || len(chain) != 1 || !made.Machine.Spec.Raw() || chain[0].Format != catalog.RawFormat {
		t.Fatalf("the fork %+v has the disk %v, %v", made.Machine, chain, err)
	}
	if got := s.RawContent(chain[0].ID); got != capturetest.RawData || slices.Contains(s.target.Layers, chain[0].ID) {
		t.Errorf("its disk %s has %q", chain[0].ID, got)
	}
	s.end(t, nil)
}
