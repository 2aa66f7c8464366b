package capturetest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/memory"
	"github.com/holdpoint/holdpoint/internal/store"
)

// Platform is what runs of the world are made of.
func (w *World) Platform(m machine.Spec) machine.Platform {
	return machine.Platform{
		Hypervisor: "7.2", MachineType: "pc-q35-7.2", CPU: "Nehalem", Accelerator: "tcg",
		MemoryBytes: m.MemoryBytes, CPUs: m.CPUs, Network: m.Network, Devices: []string{"virtio-blk"},
	}
}

// FullRequest asks for a full checkpoint of the machine as it is now.
func (w *World) FullRequest(id, name string) capture.FullRequest {
	w.tb.Helper()
	return capture.FullRequest{
		Operation: w.Operation, Machine: w.Now(), Source: w.Source, Enter: w.Enter,
		Checkpoint: checkpoint.Checkpoint{ID: id, Name: name}, Note: w.Note,
	}
}

// Note keeps what a person should read.
func (w *World) Note(format string, args ...any) {
	w.Notes = append(w.Notes, fmt.Sprintf(format, args...))
}

// MemoryOf reads the memory of a full checkpoint from its layers alone: the
// first byte of each page that is not zero, by page.
func (w *World) MemoryOf(k checkpoint.Checkpoint) map[int64]byte {
	w.tb.Helper()
	dir, err := os.MkdirTemp(w.Home.Dir(), "look")
	must(w.tb, err)
	defer os.RemoveAll(dir)
	records, err := w.Catalog.GetLayers(context.Background(), k.Full.Memory...)
	must(w.tb, err)
	var layers []*store.Layer
	for _, r := range records {
		layer, err := store.Open(w.Capturer.Path(r))
		must(w.tb, err)
		defer layer.Close()
		layers = append(layers, layer)
	}
	path := filepath.Join(dir, "memory")
	must(w.tb, store.Materialize(context.Background(), store.MaterializeConfig{
		Path: path, MemoryBytes: w.Machine.Spec.MemoryBytes, Layers: layers, Unsynced: true,
	}))
	return w.FirstBytes(path)
}

// LayerInfo is what a memory layer says of itself.
func (w *World) LayerInfo(id string) store.Info {
	w.tb.Helper()
	layer, err := store.Open(w.Home.MemoryLayer(id))
	must(w.tb, err)
	defer layer.Close()
	return layer.Info()
}

// FirstBytes reads a memory file: the first byte of each page that is not zero.
func (w *World) FirstBytes(path string) map[int64]byte {
	w.tb.Helper()
	file, err := os.Open(path)
	must(w.tb, err)
	defer file.Close()
	found := map[int64]byte{}
	page := make([]byte, store.PageSize)
	for n := range w.Source.pages {
		_, err := file.ReadAt(page, n*store.PageSize)
		must(w.tb, err)
		if page[0] != 0 {
			found[n] = page[0]
		}
	}
	return found
}

// Write has the guest fill a page of its memory.
func (s *Source) Write(page int64, with byte) {
	if s.pages == nil {
		s.pages, s.changed = map[int64]byte{}, map[int64]bool{}
	}
	s.pages[page], s.changed[page] = with, true
}

// Memory is the guest's memory now: the first byte of each page that is not zero.
func (s *Source) Memory() map[int64]byte {
	now := map[int64]byte{}
	for page, with := range s.pages {
		if with != 0 {
			now[page] = with
		}
	}
	return now
}

// Capture stages the pages that were written since the parent.
func (s *Source) Capture(_ context.Context, o capture.CaptureOrder) (capture.CaptureReport, error) {
	s.orders = append(s.orders, o)
	if err := s.do("capture"); err != nil {
		return capture.CaptureReport{}, err
	}
	s.disk = append(s.diskNow(), o.Top.ID)
	if s.Fails["capture after the switch"] {
		return capture.CaptureReport{}, ErrSource
	}
	pages := dirty.NewSet(s.world.Machine.Spec.MemoryBytes)
	for page := range s.pages {
		if s.changed[page] || o.ParentID == "" || o.ParentID != s.parent {
			pages.Add(page, 1)
		}
	}
	if err := s.stage(o.Dir, pages); err != nil {
		return capture.CaptureReport{}, err
	}
	s.captured, s.changed = s.changed, map[int64]bool{}
	s.pending = o.CheckpointID
	if o.StayPaused {
		s.running = false
	}
	if s.OnCapture != nil {
		s.OnCapture()
	}
	platform, err := json.Marshal(s.world.Platform(s.world.Machine.Spec))
	return capture.CaptureReport{
		ChangedPages: pages.Len(), Tracking: "userfaultfd", Platform: platform,
		Phases: capture.Phases{Rounds: 1, Window: machine.WindowTimes{Downtime: 8 * time.Millisecond}},
	}, err
}

func (s *Source) stage(dir string, pages *dirty.Set) error {
	set, err := pages.MarshalBinary()
	if err != nil {
		return err
	}
	memory, err := os.OpenFile(filepath.Join(dir, "memory"), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer memory.Close()
	if err := memory.Truncate(s.world.Machine.Spec.MemoryBytes); err != nil {
		return err
	}
	for page, with := range s.pages {
		if !pages.Has(page) {
			continue
		}
		if _, err := memory.WriteAt(slices.Repeat([]byte{with}, store.PageSize), page*store.PageSize); err != nil {
			return err
		}
	}
	if s.Fails["stage"] {
		set = set[:10]
	}
	if err := os.WriteFile(filepath.Join(dir, "pages"), set, 0o600); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "devices"), []byte("state of the devices"), 0o600)
}

// SettleCapture counts pages from the checkpoint on, or from the old one again.
func (s *Source) SettleCapture(_ context.Context, id string, published, resume bool) (settled capture.Settled, err error) {
	what := "taken back"
	if published {
		what = "published"
	}
	if resume {
		what += ", resumed"
	}
	if s.pending != id {
		what += ", unknown"
	}
	if err := s.do(what); err != nil {
		return settled, err
	}
	switch {
	case s.Fails["clock"]:
		settled.ClockTrouble = "the guest does not answer"
	case s.running:
		settled.Returned = 20 * time.Millisecond
	}
	switch {
	case s.pending == id && published:
		s.parent = id
	case s.pending == id:
		for page := range s.captured {
			s.changed[page] = true
		}
	}
	if s.pending == id {
		s.pending = ""
	}
	if resume {
		s.running = true
	}
	return settled, nil
}

// Disk are the layers that the run has open.
func (s *Source) Disk(context.Context) ([]string, error) {
	if s.Fails["disk"] {
		return nil, errdefs.New(errdefs.OutcomeUnknown, "the run does not say")
	}
	return s.diskNow(), nil
}

// ChangedBytes is 1 MiB.
func (s *Source) ChangedBytes() int64 {
	if s.Unbounded {
		return 0
	}
	return 1 << 20
}

// diskNow is the chain of the machine at first, and after each boot.
func (s *Source) diskNow() []string {
	if s.disk == nil {
		s.disk = append([]string{"image"}, s.first...)
	}
	return s.disk
}

// NewMemory makes the cache of the world's memory files.
func (w *World) NewMemory() *memory.Cache {
	w.tb.Helper()
	cache, err := memory.New(memory.Config{Home: w.Home, Files: w.Files, Catalog: w.Catalog})
	must(w.tb, err)
	return cache
}

// RemoveUnknown removes files that were made and never recorded, as a new
// daemon does.
func (w *World) RemoveUnknown() error {
	layers, err := w.Catalog.ListLayers(context.Background())
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, layer := range layers {
		known[w.Capturer.Path(layer)] = true
	}
	entries, err := os.ReadDir(w.Home.Layers())
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if path := w.Home.Layers() + "/" + entry.Name(); !known[path] {
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
	return nil
}
