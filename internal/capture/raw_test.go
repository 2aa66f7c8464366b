package capture_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
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
)

func rawRequest(w *capturetest.World) capture.StoppedRequest {
	r := request(w)
	r.Operation, r.Progress = w.Operation, func(int64, int64) {}
	return r
}

// layerFiles are the names in the folder of layers.
func layerFiles(t *testing.T, w *capturetest.World) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(w.Home.Layers())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestStoppedCheckpointOfRawDisk: the disk is copied, the copy is the checkpoint's
// and sealed, and the machine goes on with its own file.
func TestStoppedCheckpointOfRawDisk(t *testing.T) {
	w := capturetest.NewRaw(t)
	before := w.Chain()
	transcript := durabletest.Record(w.Files, w.Home.Dir())
	r := rawRequest(w)
	transcript.Name(r.Checkpoint.ID, "checkpoint")
	var done, total int64
	r.Progress = func(a, b int64) { done, total = a, b }
	result, err := w.Capturer.Stopped(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "raw.golden", transcript.String())
	if diff := cmp.Diff([]string{"stop", "boot"}, w.Source.Done); diff != "" {
		t.Errorf("done to the machine (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{capture.PhasePrepare, capture.PhaseStop, capture.PhaseCopy, capture.PhaseBoot}, w.Phases); diff != "" {
		t.Errorf("phases (-want +got):\n%s", diff)
	}
	k := result.Checkpoint
	if !slices.Equal(w.Chain(), before) || len(k.Layers) != 1 || k.Layers[0] == before[0] || k.Consistency != checkpoint.Stopped {
		t.Errorf("checkpoint %+v, chain %v", k, w.Chain())
	}
	if done != total || total == 0 || result.Way == "" || k.DiskBytes == 0 || k.DiskBytes > 1<<20 {
		t.Errorf("progress %d of %d, by %q, %d bytes", done, total, result.Way, k.DiskBytes)
	}
	w.WriteRaw("WHAT")
	if got := w.RawContent(k.Layers[0]); got != capturetest.RawData {
		t.Errorf("the checkpoint has %q", got)
	}
	if err := w.Capturer.Settle(t.Context(), k); err != nil {
		t.Fatal(err)
	}
	layers, err := w.Catalog.GetLayers(t.Context(), k.Layers[0], before[0])
	if err != nil {
		t.Fatal(err)
	}
	kept := layers[0]
	if kept.State != catalog.LayerSealed || kept.StoredBytes != k.DiskBytes || !strings.HasPrefix(kept.Digest, "disk-sha256:") || layers[1].Digest != "" {
		t.Errorf("recorded %+v", layers)
	}
	info, err := os.Stat(w.Capturer.Path(kept))
	if err != nil || info.Mode().Perm() != 0o400 || info.Size() != capturetest.RawBytes {
		t.Errorf("the copy: %v, %v", info, err)
	}
	if err := w.Capturer.CheckLayers(layers, "it"); err != nil {
		t.Error(err)
	}
	if err := os.Truncate(w.Capturer.Path(layers[1]), 5); err != nil {
		t.Fatal(err)
	}
	if err := w.Capturer.CheckLayers(layers, "it"); !errdefs.Is(err, errdefs.Storage) {
		t.Errorf("a disk that is cut short: %v", err)
	}
}

// TestCopyThatFails: the machine boots again, and nothing is left.
func TestCopyThatFails(t *testing.T) {
	tests := map[string]struct {
		prepare func(w *capturetest.World, r *capture.StoppedRequest, cancel func())
		kind    errdefs.Kind
	}{
		"canceled amid the copy": {
			func(_ *capturetest.World, r *capture.StoppedRequest, cancel func()) {
				r.Progress = func(int64, int64) { cancel() }
			},
			errdefs.Interrupted,
		},
		"canceled before it": {
			func(w *capturetest.World, _ *capture.StoppedRequest, cancel func()) { w.Source.OnStop = cancel },
			errdefs.Interrupted,
		},
		"somebody writes to the disk": {
			func(w *capturetest.World, r *capture.StoppedRequest, _ func()) {
				path := w.Home.RawLayer(w.Chain()[0])
				r.Progress = func(int64, int64) {
					if err := os.Chtimes(path, time.Now(), time.Now().Add(time.Hour)); err != nil {
						t.Error(err)
					}
				}
			},
			errdefs.Conflict,
		},
		"the name is taken meanwhile": {
			func(w *capturetest.World, r *capture.StoppedRequest, _ func()) {
				other := rawRequest(w)
				if _, err := w.Capturer.Stopped(t.Context(), other); err != nil {
					t.Fatal(err)
				}
				w.Source.Done = nil
			},
			errdefs.AlreadyExists,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w := capturetest.NewRaw(t)
			r := rawRequest(w)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			test.prepare(w, &r, cancel)
			before := layerFiles(t, w)
			_, err := w.Capturer.Stopped(ctx, r)
			if !errdefs.Is(err, test.kind) {
				t.Errorf("error %v (%s), want %s", err, errdefs.KindOf(err), test.kind)
			}
			if diff := cmp.Diff([]string{"stop", "boot"}, w.Source.Done); diff != "" || !w.Source.Running() {
				t.Errorf("done to the machine (-want +got):\n%s", diff)
			}
			if err := w.Catalog.Finish(t.Context(), w.Operation, catalog.Outcome{State: catalog.OperationFailed, Err: err}); err != nil {
				t.Fatal(err)
			}
			if err := w.Capturer.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			if after := layerFiles(t, w); len(after) != len(before) {
				t.Errorf("files %v, were %v", after, before)
			}
		})
	}
}

// TestCrashAtEveryStepOfRawDisk: a crash before any step leaves no checkpoint or
// a whole one, and the machine its own disk.
func TestCrashAtEveryStepOfRawDisk(t *testing.T) {
	for k := 0; ; k++ {
		w := capturetest.NewRaw(t)
		before := w.Chain()
		r := rawRequest(w)
		durabletest.CrashAfter(w.Files, k)
		_, err := w.Capturer.Stopped(t.Context(), r)
		crashed := errors.Is(err, durabletest.ErrCrashed)
		w.Files.Before = nil
		w.Reopen()
		published, getErr := w.Catalog.GetCheckpoint(t.Context(), r.Checkpoint.ID)
		switch {
		case getErr == nil && w.RawContent(published.Layers[0]) != capturetest.RawData:
			t.Errorf("step %d: the checkpoint has %q", k, w.RawContent(published.Layers[0]))
		case getErr != nil && !errdefs.Is(getErr, errdefs.NotFound):
			t.Errorf("step %d: %v", k, getErr)
		}
		if chain := w.Chain(); !slices.Equal(chain, before) {
			t.Errorf("step %d: the disk is %v, was %v", k, chain, before)
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
