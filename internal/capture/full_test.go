package capture_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/capture/capturetest"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// full takes a full checkpoint that must succeed.
func full(t *testing.T, w *capturetest.World, name string) capture.FullResult {
	t.Helper()
	result, err := w.Capturer.Full(t.Context(), w.FullRequest(durable.NewID(), name))
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// sound holds that a listed full checkpoint can be restored: its memory is
// want, its files are there, and the chain of its machine goes on above it.
func sound(t *testing.T, w *capturetest.World, id string, want map[int64]byte) checkpoint.Checkpoint {
	t.Helper()
	k, err := w.Catalog.GetCheckpoint(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, w.MemoryOf(k)); diff != "" {
		t.Errorf("memory of checkpoint %s (-want +got):\n%s", k.Name, diff)
	}
	layers, err := w.Catalog.GetLayers(t.Context(), slices.Concat(k.Layers, k.Full.Memory, []string{k.Full.Devices})...)
	if err != nil {
		t.Fatal(err)
	}
	for _, layer := range layers {
		if layer.State != catalog.LayerSealed || layer.StoredBytes == 0 {
			t.Errorf("layer %s %s of checkpoint %s is %s and has %d bytes", layer.ID, layer.Format, k.Name, layer.State, layer.StoredBytes)
		}
	}
	if err := w.Capturer.CheckLayers(layers, "checkpoint"); err != nil {
		t.Error(err)
	}
	return k
}

// tidy ends the operation and holds that the layers' folder has what is
// recorded and no more, and nothing is staged.
func tidy(t *testing.T, w *capturetest.World) {
	t.Helper()
	if err := w.Catalog.Finish(t.Context(), w.Operation, catalog.Outcome{State: catalog.OperationDone}); err != nil {
		t.Fatal(err)
	}
	if err := w.Capturer.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	layers, err := w.Catalog.ListLayers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(w.Home.Layers())
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != len(layers) {
		t.Errorf("%d files, %d recorded layers", len(entries), len(layers))
	}
	staged, err := os.ReadDir(w.Home.Run(w.Machine.RunID))
	if err != nil || len(staged) != 0 {
		t.Errorf("staged %v, %v", staged, err)
	}
}

// byFile puts the steps of a transcript that happen at the same time in order:
// those between the two syncs that all wait for.
func byFile(transcript string) string {
	lines := strings.SplitAfter(transcript, "\n")
	sort := func(from, to int) {
		slices.SortStableFunc(lines[from:to], func(a, b string) int { return strings.Compare(file(a), file(b)) })
	}
	add := slices.IndexFunc(lines, func(s string) bool { return strings.HasPrefix(s, "commit add-layer") })
	end := slices.IndexFunc(lines, func(s string) bool { return strings.HasPrefix(s, "commit publish") })
	if add >= 0 && end > add {
		sort(add+1, end-1) // the last one is the sync of the folder
	}
	return strings.Join(lines, "")
}

func file(line string) string {
	words := strings.Fields(line)
	if len(words) == 0 {
		return ""
	}
	return words[len(words)-1]
}

func TestFullCheckpoint(t *testing.T) {
	w := capturetest.New(t)
	w.Source.Write(3, 7)
	w.Source.Write(70_000, 8)
	first := w.Source.Memory()
	transcript := durabletest.Record(w.Files, w.Home.Dir())
	one := full(t, w, "one")
	w.Files.Before = nil
	for id, name := range map[string]string{
		one.Checkpoint.ID: "checkpoint", one.Checkpoint.Full.Memory[0]: "memory", one.Checkpoint.Full.Devices: "devices",
		w.Machine.RunID: "run", one.Checkpoint.Layers[0]: "sealed", one.Detail.Layer: "top",
	} {
		transcript.Name(id, name)
	}
	golden(t, "full.golden", byFile(transcript.String()))

	w.Source.Write(3, 7) // the same again
	w.Source.Write(5, 9)
	w.Source.Write(70_000, 0)
	second := w.Source.Memory()
	two := full(t, w, "two")
	sound(t, w, one.Checkpoint.ID, first)
	k := sound(t, w, two.Checkpoint.ID, second)
	if k.Kind != checkpoint.Full || k.Parent != one.Checkpoint.ID || len(k.Full.Memory) != 2 || k.Full.Memory[0] != one.Checkpoint.Full.Memory[0] {
		t.Errorf("second checkpoint %+v", k)
	}
	if info := w.LayerInfo(k.Full.Memory[1]); info.DataPages != 1 || info.ZeroPages != 1 {
		t.Errorf("the second memory layer has %d pages and %d zero ones, 1 and 1 have changed", info.DataPages, info.ZeroPages)
	}
	if orders := w.Source.Orders(); orders[0].ParentID != "" || orders[1].ParentID != one.Checkpoint.ID {
		t.Errorf("asked for %+v", orders)
	}
	if diff := cmp.Diff([]string{"capture", "published", "capture", "published"}, w.Source.Done); diff != "" {
		t.Errorf("done to the machine (-want +got):\n%s", diff)
	}
	if chain := w.Chain(); len(chain) != 3 || !slices.Equal(k.Layers, chain[:2]) {
		t.Errorf("checkpoint owns %v, the chain is %v", k.Layers, chain)
	}
	if m := w.Now(); m.Head != k.ID || m.MemoryHead != k.ID || !w.Source.Running() {
		t.Errorf("machine %+v runs: %v", m, w.Source.Running())
	}
	if two.Downtime == 0 || two.Return == 0 || two.Durable < two.Prepare+two.Capture+two.Encode+two.Publish || two.MemoryBytes != k.Full.MemoryBytes || two.DiskBytes == 0 {
		t.Errorf("result %+v", two)
	}
	tidy(t, w)
}

func TestFullCheckpointThatFails(t *testing.T) {
	tests := map[string]struct {
		prepare func(*capturetest.World, *capture.FullRequest, context.CancelFunc)
		kind    errdefs.Kind
		done    []string
		layers  int
	}{
		"before the switch": {
			func(w *capturetest.World, _ *capture.FullRequest, _ context.CancelFunc) {
				w.Source.Fails = map[string]bool{"capture": true}
			},
			errdefs.Internal,
			[]string{"capture failed", "taken back, unknown"},
			2,
		},
		"after the switch": {
			func(w *capturetest.World, _ *capture.FullRequest, _ context.CancelFunc) {
				w.Source.Fails = map[string]bool{"capture after the switch": true}
			},
			errdefs.Internal,
			[]string{"capture", "taken back, unknown"},
			3,
		},
		"nobody knows": {
			func(w *capturetest.World, _ *capture.FullRequest, _ context.CancelFunc) {
				w.Source.Fails = map[string]bool{"capture": true, "disk": true}
			},
			errdefs.Internal,
			[]string{"capture failed", "taken back, unknown"},
			3,
		},
		"torn": {
			func(w *capturetest.World, _ *capture.FullRequest, _ context.CancelFunc) {
				w.Source.Fails = map[string]bool{"stage": true}
			},
			errdefs.Storage,
			[]string{"capture", "taken back"},
			3,
		},
		"name taken": {
			func(_ *capturetest.World, r *capture.FullRequest, _ context.CancelFunc) { r.Checkpoint.Name = "zero" },
			errdefs.AlreadyExists,
			[]string{"capture", "taken back"},
			3,
		},
		"canceled": {
			func(w *capturetest.World, r *capture.FullRequest, cancel context.CancelFunc) {
				r.StayPaused, w.Source.OnCapture = true, cancel
			},
			errdefs.Interrupted,
			[]string{"capture", "taken back, resumed"},
			3,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w := capturetest.New(t)
			w.Source.Write(1, 1)
			zero := full(t, w, "zero")
			zeroMemory := w.Source.Memory()
			w.Source.Write(2, 2)
			w.Source.Done = nil
			r := w.FullRequest(durable.NewID(), "one")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			test.prepare(w, &r, cancel)
			_, err := w.Capturer.Full(ctx, r)
			if !errdefs.Is(err, test.kind) {
				t.Errorf("error %v (%s), want %s", err, errdefs.KindOf(err), test.kind)
			}
			if diff := cmp.Diff(test.done, w.Source.Done); diff != "" {
				t.Errorf("done to the machine (-want +got):\n%s", diff)
			}
			if chain := w.Chain(); len(chain) != test.layers || !w.Source.Running() {
				t.Errorf("chain has %d layers, want %d; runs: %v", len(chain), test.layers, w.Source.Running())
			}
			if list, err := w.Catalog.ListCheckpoints(t.Context(), ""); err != nil || len(list) != 1 {
				t.Errorf("listed %v, %v", list, err)
			}
			// What the failed one had is in the next one.
			w.Source.Fails, w.Source.OnCapture = nil, nil
			next := full(t, w, "next")
			sound(t, w, zero.Checkpoint.ID, zeroMemory)
			sound(t, w, next.Checkpoint.ID, w.Source.Memory())
			tidy(t, w)
		})
	}
}

func TestRefusedFullCheckpointsHaveNoEffect(t *testing.T) {
	w := capturetest.New(t)
	w.Source.Write(1, 1)
	full(t, w, "one")
	w.Source.Done, w.Phases = nil, nil
	chain := w.Chain()
	r := w.FullRequest(durable.NewID(), "two")
	r.Machine.Spec.MemoryBytes, w.Source.Unbounded = 1<<50, true
	if _, err := w.Capturer.Full(t.Context(), r); !errdefs.Is(err, errdefs.NoSpace) {
		t.Errorf("error %v (%s), want NO_SPACE", err, errdefs.KindOf(err))
	}
	if len(w.Source.Done) != 0 || len(w.Phases) != 0 || !slices.Equal(chain, w.Chain()) {
		t.Errorf("done %v, phases %v, chain %v was %v", w.Source.Done, w.Phases, w.Chain(), chain)
	}
}

// A damaged memory layer spoils the checkpoints that need it, not the next ones.
func TestFullCheckpointAboveADamagedOne(t *testing.T) {
	w := capturetest.New(t)
	w.Source.Write(1, 1)
	one := full(t, w, "one")
	w.Source.Write(2, 2)
	layers, err := w.Catalog.GetLayers(t.Context(), one.Checkpoint.Full.Memory...)
	if err != nil {
		t.Fatal(err)
	}
	path := w.Capturer.Path(layers[0])
	if err := errors.Join(os.Chmod(path, 0o600), os.Truncate(path, layers[0].StoredBytes-1)); err != nil {
		t.Fatal(err)
	}
	two := full(t, w, "two")
	k := sound(t, w, two.Checkpoint.ID, w.Source.Memory())
	if len(k.Full.Memory) != 1 || len(w.Notes) != 1 || !strings.Contains(w.Notes[0], layers[0].ID) {
		t.Errorf("memory %v, notes %q", k.Full.Memory, w.Notes)
	}
	w.Source.Write(3, 3)
	three := full(t, w, "three")
	if k := sound(t, w, three.Checkpoint.ID, w.Source.Memory()); len(k.Full.Memory) != 2 {
		t.Errorf("memory %v", k.Full.Memory)
	}
}

func TestFullCheckpointThatStaysPaused(t *testing.T) {
	w := capturetest.New(t)
	w.Source.Write(1, 1)
	r := w.FullRequest(durable.NewID(), "one")
	r.StayPaused = true
	result, err := w.Capturer.Full(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if w.Source.Running() {
		t.Error("the run goes on")
	}
	if err := w.Capturer.Decide(t.Context(), w.Source, result.Detail, true); err != nil || !w.Source.Running() {
		t.Errorf("%v, runs: %v", err, w.Source.Running())
	}
	if diff := cmp.Diff([]string{"capture", "published, resumed"}, w.Source.Done); diff != "" {
		t.Errorf("done to the machine (-want +got):\n%s", diff)
	}
	tidy(t, w)
}

// A run that cannot be told of its checkpoint counts from an older one, which
// is more and never less.
func TestRunThatIsNotTold(t *testing.T) {
	w := capturetest.New(t)
	w.Source.Write(1, 1)
	w.Source.Fails = map[string]bool{"published": true}
	one := full(t, w, "one")
	if len(w.Notes) != 1 {
		t.Errorf("notes %q", w.Notes)
	}
	sound(t, w, one.Checkpoint.ID, w.Source.Memory())
	w.Source.Fails = nil
	w.Source.Write(2, 2)
	two := full(t, w, "two")
	sound(t, w, two.Checkpoint.ID, w.Source.Memory())
}

// A guest that does not answer is kept all the same, and nobody says that it
// answered.
func TestSilentGuest(t *testing.T) {
	w := capturetest.New(t)
	w.Source.Write(1, 1)
	w.Source.Fails = map[string]bool{"clock": true}
	one := full(t, w, "one")
	if one.Return != 0 || one.Durable == 0 || len(w.Notes) != 1 || !strings.Contains(w.Notes[0], "does not answer") {
		t.Errorf("result %+v, notes %q", one, w.Notes)
	}
	sound(t, w, one.Checkpoint.ID, w.Source.Memory())
}

func TestImageBoot(t *testing.T) {
	w := capturetest.New(t)
	w.Source.Write(1, 1)
	r := w.FullRequest(durable.NewID(), "")
	r.ImageBoot = &capture.ImageBoot{Shape: "small"}
	result, err := w.Capturer.Full(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := w.Catalog.ImageBoot(t.Context(), w.Machine.ImageBuildID, "small")
	if err != nil {
		t.Fatal(err)
	}
	if boot.ID != result.Checkpoint.ID || boot.MachineID != "" || !boot.Full.Unconfigured {
		t.Errorf("boot %+v", boot)
	}
	if m := w.Now(); m.Head != "" || m.MemoryHead != boot.ID {
		t.Errorf("machine %+v", m)
	}
	w.Source.Write(2, 2)
	next := full(t, w, "next")
	k := sound(t, w, next.Checkpoint.ID, w.Source.Memory())
	if len(k.Full.Memory) != 2 || k.Full.Unconfigured {
		t.Errorf("next %+v", k.Full)
	}
}

// A daemon that dies before any step finds either no checkpoint or a whole one
// when it is back, a run that goes on, and a disk that knows what it wrote.
func TestFullCrashAtEveryStep(t *testing.T) {
	for _, stay := range []bool{false, true} {
		for k := 0; ; k++ {
			w := capturetest.New(t)
			w.Source.Write(1, 1)
			zero := full(t, w, "zero")
			w.Source.Write(2, 2)
			r := w.FullRequest(durable.NewID(), "one")
			r.StayPaused = stay
			var phase string
			var detail capture.FullDetail
			r.Enter = func(ctx context.Context, entered, text string, d any) error {
				if err := w.Enter(ctx, entered, text, d); err != nil {
					return err
				}
				if entered != capture.PhaseEncode { // beside others; it adds nothing
					phase, detail = entered, d.(capture.FullDetail)
				}
				return nil
			}
			memory := w.Source.Memory()
			crashed := durabletest.CrashAfter(w.Files, k)
			_, err := w.Capturer.Full(t.Context(), r)
			if !crashed() {
				if err != nil || k < 15 {
					t.Fatalf("ended after %d steps: %v", k, err)
				}
				break
			}
			w.Files.Before = nil
			w.Reopen()
			settle(t, w, k, phase, detail)
			want := map[string]map[int64]byte{zero.Checkpoint.ID: {1: 1}}
			if published, err := w.Catalog.GetCheckpoint(t.Context(), r.Checkpoint.ID); err == nil {
				want[published.ID] = memory
			}
			list, err := w.Catalog.ListCheckpoints(t.Context(), w.Machine.ID)
			if err != nil || len(list) != len(want) {
				t.Errorf("step %d: listed %v, %v", k, list, err)
			}
			for id := range maps.Keys(want) {
				sound(t, w, id, want[id])
			}
			w.Source.Write(3, 3)
			next := full(t, w, "next")
			sound(t, w, next.Checkpoint.ID, w.Source.Memory())
			tidy(t, w)
		}
	}
}

// settle is what a new daemon does with the operation.
func settle(t *testing.T, w *capturetest.World, k int, phase string, detail capture.FullDetail) {
	t.Helper()
	if phase != "" {
		if _, err := w.Capturer.SettleFull(t.Context(), w.Now(), detail, w.Source, true); err != nil {
			t.Fatalf("step %d: %v", k, err)
		}
	}
	if err := w.RemoveUnknown(); err != nil {
		t.Fatal(err)
	}
	disk, err := w.Source.Disk(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if chain := w.Chain(); chain[len(chain)-1] != disk[len(disk)-1] {
		t.Errorf("step %d: the run writes to %s, the chain is %v", k, disk[len(disk)-1], chain)
	}
	if !w.Source.Running() {
		t.Errorf("step %d: the run is paused", k)
	}
	for _, layer := range []machine.State{w.Now().State} {
		if layer != machine.Running {
			t.Errorf("step %d: state %s", k, layer)
		}
	}
}
