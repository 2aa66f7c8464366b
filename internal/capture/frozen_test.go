package capture_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/capture/capturetest"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
)

// frozen takes a frozen checkpoint that must succeed.
func frozen(t *testing.T, w *capturetest.World, name string) capture.FrozenResult {
	t.Helper()
	result, err := w.Capturer.Frozen(t.Context(), w.FrozenRequest(durable.NewID(), name))
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// bootable holds that a listed disk checkpoint has what a machine boots from.
func bootable(t *testing.T, w *capturetest.World, id string) checkpoint.Checkpoint {
	t.Helper()
	k, err := w.Catalog.GetCheckpoint(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := w.Catalog.GetLayers(t.Context(), k.Layers...)
	if err != nil || len(layers) == 0 {
		t.Fatalf("layers %v, %v", layers, err)
	}
	for _, layer := range layers {
		if layer.State != catalog.LayerSealed {
			t.Errorf("layer %s of checkpoint %s is %s", layer.ID, k.Name, layer.State)
		}
	}
	if err := w.Capturer.CheckLayers(layers, "checkpoint"); err != nil {
		t.Error(err)
	}
	return k
}

// goesOn holds that the run writes to the top of the machine's chain, which is
// live, and everything below is sealed.
func goesOn(t *testing.T, w *capturetest.World) {
	t.Helper()
	chain, err := w.Catalog.Chain(t.Context(), w.Machine.ID)
	if err != nil {
		t.Fatal(err)
	}
	for i, layer := range chain {
		if want := i == len(chain)-1; (layer.State != catalog.LayerSealed) != want {
			t.Errorf("layer %d of %d is %s", i, len(chain), layer.State)
		}
	}
	disk, err := w.Source.Disk(t.Context())
	if err != nil || disk[len(disk)-1] != chain[len(chain)-1].ID || chain[len(chain)-1].State != catalog.LayerLive {
		t.Errorf("the run writes to %v, the chain is %+v, %v", disk, chain, err)
	}
	if !w.Source.Running() {
		t.Error("the run does not run")
	}
}

func TestFrozenCheckpoint(t *testing.T) {
	w := capturetest.New(t)
	first := frozen(t, w, "first")
	w.Source.HookFailure = "a hook: exit status 1"
	second := frozen(t, w, "second")
	goesOn(t, w)
	if want := []string{"prepare", "freeze", "prepare", "freeze"}; !slices.Equal(w.Phases, want) {
		t.Errorf("phases %v", w.Phases)
	}
	for _, r := range []capture.FrozenResult{first, second} {
		k := bootable(t, w, r.Checkpoint.ID)
		if k.Kind != checkpoint.Disk || k.Consistency != checkpoint.Frozen || k.DiskBytes == 0 {
			t.Errorf("%+v", k)
		}
	}
	a, b := bootable(t, w, first.Checkpoint.ID), bootable(t, w, second.Checkpoint.ID)
	if b.Parent != a.ID || len(b.Layers) != len(a.Layers)+1 || a.HookFailure != "" || b.HookFailure != w.Source.HookFailure {
		t.Errorf("first %+v\nsecond %+v", a, b)
	}
	w.Source.Write(1, 7) // a full one takes its turn among them
	k := full(t, w, "third")
	sound(t, w, k.Checkpoint.ID, map[int64]byte{1: 7})
	frozen(t, w, "fourth")
	w.Source.Write(2, 8)
	k = full(t, w, "fifth")
	sound(t, w, k.Checkpoint.ID, map[int64]byte{1: 7, 2: 8})
	goesOn(t, w)
	tidy(t, w)
}

func TestFrozenCheckpointThatFails(t *testing.T) {
	for _, fails := range []string{"freeze", "thaw"} {
		t.Run(fails, func(t *testing.T) {
			w := capturetest.New(t)
			w.Source.Fails = map[string]bool{fails: true}
			_, err := w.Capturer.Frozen(t.Context(), w.FrozenRequest(durable.NewID(), "one"))
			if err == nil || !strings.HasPrefix(err.Error(), "checkpoint of web: ") {
				t.Fatalf("error %v", err)
			}
			if list, err := w.Catalog.ListCheckpoints(t.Context(), w.Machine.ID); err != nil || len(list) != 0 {
				t.Errorf("listed %v, %v", list, err)
			}
			goesOn(t, w)
			w.Source.Fails = nil
			bootable(t, w, frozen(t, w, "two").Checkpoint.ID)
			goesOn(t, w)
			tidy(t, w)
		})
	}
	w := capturetest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	w.Source.OnFreeze = cancel
	if _, err := w.Capturer.Frozen(ctx, w.FrozenRequest(durable.NewID(), "one")); err == nil {
		t.Error("a canceled checkpoint was made")
	}
	goesOn(t, w)
	tidy(t, w)
}

// A daemon that dies at any step leaves either the checkpoint or nothing of it, and
// the machine goes on in any case.
func TestFrozenCrashAtEveryStep(t *testing.T) {
	for k := 0; ; k++ {
		w := capturetest.New(t)
		zero := frozen(t, w, "zero")
		r := w.FrozenRequest(durable.NewID(), "one")
		var phase string
		var detail capture.FullDetail
		r.Enter = func(ctx context.Context, entered, text string, d any) error {
			if err := w.Enter(ctx, entered, text, d); err != nil {
				return err
			}
			phase, detail = entered, d.(capture.FullDetail)
			return nil
		}
		crashed := durabletest.CrashAfter(w.Files, k)
		_, err := w.Capturer.Frozen(t.Context(), r)
		if !crashed() {
			if err != nil || k < 6 {
				t.Fatalf("ended after %d steps: %v", k, err)
			}
			break
		}
		w.Files.Before = nil
		w.Reopen()
		settle(t, w, k, phase, detail)
		want := 1
		if _, err := w.Catalog.GetCheckpoint(t.Context(), r.Checkpoint.ID); err == nil {
			want = 2
			bootable(t, w, r.Checkpoint.ID)
		}
		if list, err := w.Catalog.ListCheckpoints(t.Context(), w.Machine.ID); err != nil || len(list) != want {
			t.Errorf("step %d: listed %v, %v", k, list, err)
		}
		bootable(t, w, zero.Checkpoint.ID)
		goesOn(t, w)
		bootable(t, w, frozen(t, w, "next").Checkpoint.ID)
		goesOn(t, w)
		tidy(t, w)
	}
}
