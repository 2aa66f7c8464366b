package capture_test

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/capture/capturetest"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

var update = flag.Bool("update", false, "write the golden files anew")

func request(w *capturetest.World) capture.StoppedRequest {
	return capture.StoppedRequest{
		Machine: w.Machine, Source: w.Source, Enter: w.Enter,
		Checkpoint: checkpoint.Checkpoint{ID: durable.NewID(), Name: "before", Routes: []checkpoint.Route{{Host: "app.localhost", Port: 80, Listening: true}}},
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("state writes differ from %s (-want +got):\n%s", path, diff)
	}
}

func TestStoppedCheckpoint(t *testing.T) {
	w := capturetest.New(t)
	transcript := durabletest.Record(w.Files, w.Home.Dir())
	r := request(w)
	transcript.Name(r.Checkpoint.ID, "checkpoint")
	done, err := w.Capturer.Stopped(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "stopped.golden", transcript.String())
	if diff := cmp.Diff([]string{"stop", "boot"}, w.Source.Done); diff != "" {
		t.Errorf("done to the machine (-want +got):\n%s", diff)
	}
	published, err := w.Catalog.GetCheckpoint(t.Context(), r.Checkpoint.ID)
	if err != nil {
		t.Fatal(err)
	}
	if published.Consistency != checkpoint.Stopped || published.Kind != checkpoint.Disk || len(published.Routes) != 1 || done.Checkpoint.ID != published.ID {
		t.Errorf("published %+v", published)
	}
	if chain := w.Chain(); len(chain) != 2 || !slices.Equal(published.Layers, chain[:1]) {
		t.Errorf("checkpoint owns %v, the chain is %v", published.Layers, chain)
	}
	if m := w.Now(); m.Head != published.ID {
		t.Errorf("head is %q", m.Head)
	}
}

func TestRefusedCheckpoints(t *testing.T) {
	tests := map[string]struct {
		prepare func(*capturetest.World, *capture.StoppedRequest)
		kind    errdefs.Kind
		done    []string
		layers  int
	}{
		"guest goes on": {
			func(w *capturetest.World, _ *capture.StoppedRequest) { w.Source.Fails = map[string]bool{"stop": true} },
			errdefs.Internal,
			[]string{"stop failed"},
			1,
		},
		"guest stops unclean": {
			func(w *capturetest.World, _ *capture.StoppedRequest) { w.Source.Unclean = true },
			errdefs.Conflict,
			[]string{"stop", "boot"},
			2,
		},
		"canceled while stopping": {
			func(w *capturetest.World, r *capture.StoppedRequest) {},
			errdefs.Interrupted,
			[]string{"stop", "boot"},
			2,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w := capturetest.New(t)
			r := request(w)
			test.prepare(w, &r)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if test.kind == errdefs.Interrupted {
				w.Source.OnStop = cancel
			}
			_, err := w.Capturer.Stopped(ctx, r)
			if !errdefs.Is(err, test.kind) {
				t.Errorf("error %v (%s), want %s", err, errdefs.KindOf(err), test.kind)
			}
			if !w.Source.Running() {
				t.Error("the machine does not run")
			}
			if diff := cmp.Diff(test.done, w.Source.Done); diff != "" {
				t.Errorf("done to the machine (-want +got):\n%s", diff)
			}
			if chain := w.Chain(); len(chain) != test.layers {
				t.Errorf("chain has %d layers, want %d", len(chain), test.layers)
			}
			if list, err := w.Catalog.ListCheckpoints(t.Context(), ""); err != nil || len(list) != 0 {
				t.Errorf("listed %v, %v", list, err)
			}
		})
	}
}

func TestAllowCrash(t *testing.T) {
	w := capturetest.New(t)
	w.Source.Fails = map[string]bool{"stop": true}
	r := request(w)
	r.AllowCrash = true
	done, err := w.Capturer.Stopped(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if done.Checkpoint.Consistency != checkpoint.Crash {
		t.Errorf("consistency %s", done.Checkpoint.Consistency)
	}
	if diff := cmp.Diff([]string{"stop failed", "kill", "boot"}, w.Source.Done); diff != "" {
		t.Errorf("done to the machine (-want +got):\n%s", diff)
	}
}

func TestBootFailsAfterPublishing(t *testing.T) {
	w := capturetest.New(t)
	w.Source.Fails = map[string]bool{"boot": true}
	r := request(w)
	done, err := w.Capturer.Stopped(t.Context(), r)
	if err == nil || done.Checkpoint.ID != r.Checkpoint.ID {
		t.Errorf("result %+v, error %v", done, err)
	}
	if _, err := w.Catalog.GetCheckpoint(t.Context(), r.Checkpoint.ID); err != nil {
		t.Error(err)
	}
}

// A crash before any step leaves either no checkpoint or a whole one, and a
// chain that can be booted.
func TestCrashAtEveryStep(t *testing.T) {
	for k := 0; ; k++ {
		w := capturetest.New(t)
		r := request(w)
		durabletest.CrashAfter(w.Files, k)
		_, err := w.Capturer.Stopped(t.Context(), r)
		crashed := errors.Is(err, durabletest.ErrCrashed)
		w.Files.Before = nil
		w.Reopen()
		published, getErr := w.Catalog.GetCheckpoint(t.Context(), r.Checkpoint.ID)
		chain := w.Chain()
		switch {
		case getErr == nil && !slices.Equal(published.Layers, chain[:len(chain)-1]):
			t.Errorf("step %d: checkpoint owns %v of chain %v", k, published.Layers, chain)
		case getErr != nil && !errdefs.Is(getErr, errdefs.NotFound):
			t.Errorf("step %d: %v", k, getErr)
		}
		if err := w.Catalog.BeginRun(t.Context(), w.Machine.ID, durable.NewID()); err != nil {
			t.Errorf("step %d: boot afterwards: %v", k, err)
		}
		if !crashed {
			if err != nil || k < 8 {
				t.Fatalf("ended after %d steps: %v", k, err)
			}
			return
		}
	}
}

// TestSign: what a checkpoint's disk was is recorded, and of no other layer: that
// may be written to still.
func TestSign(t *testing.T) {
	w := capturetest.New(t)
	if _, err := w.Capturer.Stopped(t.Context(), request(w)); err != nil {
		t.Fatal(err)
	}
	if err := w.Capturer.Sign(t.Context()); err != nil {
		t.Fatal(err)
	}
	layers, err := w.Catalog.GetLayers(t.Context(), w.Chain()...)
	if err != nil {
		t.Fatal(err)
	}
	want, bytes, err := disk.Digest(t.Context(), w.Capturer.Path(layers[0]))
	if err != nil {
		t.Fatal(err)
	}
	if layers[0].Digest != want || layers[0].StoredBytes != bytes || layers[1].Digest != "" {
		t.Errorf("recorded %+v, want %s of %d bytes, and nothing of the top", layers, want, bytes)
	}
}
