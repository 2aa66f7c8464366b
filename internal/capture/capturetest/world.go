// Package capturetest is a world for tests of captures and restores: a home
// with a catalog, an image and one machine, whose run is a double that notes
// what is done to it. No process runs in it.
package capturetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/memory"
)

// ErrSource is what the double fails with where a test says so.
var ErrSource = errors.New("the run does not do that")

// World is the home and what is in it.
type World struct {
	tb       testing.TB
	Home     *home.Home
	Files    *durable.FS
	Catalog  *catalog.Catalog
	Capturer *capture.Capturer
	// Machine is as it was recorded at first; Now reads it again.
	Machine catalog.Machine
	// Operation is an admitted operation's id.
	Operation string
	Source    *Source
	// Memory is the cache of memory files.
	Memory *memory.Cache
	// Phases are those that were entered, and Notes what people should read.
	Phases []string
	Notes  []string

	mu sync.Mutex
}

// New makes a world. The machine runs, with one live layer.
func New(tb testing.TB) *World { return newWorld(tb, false) }

// RawBytes is the size of a raw disk, and RawData what is in the middle of it.
const (
	RawBytes = 1 << 30
	RawData  = "what the guest wrote"
)

// NewRaw makes a world whose machine has a raw disk.
func NewRaw(tb testing.TB) *World { return newWorld(tb, true) }

// RawContent is the data of a machine's raw disk, or of a checkpoint's copy of it.
func (w *World) RawContent(layerID string) string {
	w.tb.Helper()
	layers, err := w.Catalog.GetLayers(context.Background(), layerID)
	must(w.tb, err)
	f, err := os.Open(w.Capturer.Path(layers[0]))
	must(w.tb, err)
	defer f.Close()
	data := make([]byte, len(RawData))
	_, err = f.ReadAt(data, RawBytes/2)
	must(w.tb, err)
	return string(data)
}

// WriteRaw is what the guest does to its raw disk.
func (w *World) WriteRaw(data string) {
	w.tb.Helper()
	f, err := os.OpenFile(w.Home.RawLayer(w.Chain()[0]), os.O_WRONLY, 0)
	must(w.tb, err)
	defer f.Close()
	_, err = f.WriteAt([]byte(data), RawBytes/2)
	must(w.tb, err)
}

// newDisk is what the machine writes to at first.
func (w *World) newDisk(raw bool) (catalog.Layer, error) {
	if !raw {
		return w.Capturer.NewLayer(w.tb.Context(), w.Machine.ID, RawBytes)
	}
	w.Machine.Spec.DiskFormat = machine.RawDisk
	root, err := os.CreateTemp(w.Home.Dir(), "root")
	must(w.tb, err)
	defer root.Close()
	_, err = root.WriteAt([]byte(RawData), RawBytes/2)
	must(w.tb, err)
	return w.Capturer.CopyDisk(w.tb.Context(), w.Machine.ID, root.Name(), RawBytes, func(int64, int64) {})
}

func newWorld(tb testing.TB, raw bool) *World {
	tb.Helper()
	// Syncs cost nothing in memory, and a test of every step does thousands.
	dir, err := os.MkdirTemp("/dev/shm", "hpw")
	if err != nil {
		dir, err = os.MkdirTemp("/tmp", "hpw")
	}
	must(tb, err)
	tb.Cleanup(func() { os.RemoveAll(dir) })
	w := &World{tb: tb, Files: &durable.FS{}, Operation: durable.NewID()}
	w.Home, err = home.Open(dir)
	must(tb, err)
	must(tb, w.Home.Create())
	w.Reopen()
	tb.Cleanup(func() { w.Catalog.Close() })
	ctx := tb.Context()
	must(tb, w.Catalog.PutImage(ctx, catalog.Image{BuildID: strings.Repeat("b", 32), Name: "debian", Architecture: "x86_64", DiskBytes: 1 << 30}))
	w.Machine = catalog.Machine{
		ID: durable.NewID(), Name: "web", ImageBuildID: strings.Repeat("b", 32), State: machine.Running, Generation: 1,
		LinkMagic: strings.Repeat("0", 32), Spec: machine.Spec{MemoryBytes: 512 << 20, CPUs: 2, DiskBytes: 1 << 30, Network: machine.NetworkNone},
	}
	layer, err := w.newDisk(raw)
	must(tb, err)
	must(tb, w.Catalog.CreateMachine(ctx, w.Machine, layer))
	must(tb, w.Catalog.BeginRun(ctx, w.Machine.ID, durable.NewID()))
	_, _, err = w.Catalog.Admit(ctx, catalog.Operation{ID: w.Operation, RequestID: w.Operation, Verb: "test"}, 1<<40)
	must(tb, err)
	w.Machine = w.Now()
	w.Source = &Source{world: w, running: true, first: w.Chain()}
	must(tb, w.Files.MkdirAll(w.Home.Run(w.Machine.RunID)))
	return w
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// Reopen opens the catalog, again if it was open, as a new daemon would.
func (w *World) Reopen() {
	w.tb.Helper()
	if w.Catalog != nil {
		must(w.tb, w.Catalog.Close())
	}
	var err error
	w.Catalog, err = catalog.Open(context.Background(), catalog.Config{Path: w.Home.Catalog(), FS: w.Files})
	must(w.tb, err)
	w.Memory = w.NewMemory()
	w.Capturer = capture.New(capture.Config{
		Catalog: w.Catalog, Files: w.Files, Home: w.Home, Overlays: overlays{w}, Memory: w.Memory,
	})
}

// Now is the machine as it is recorded.
func (w *World) Now() catalog.Machine {
	w.tb.Helper()
	m, err := w.Catalog.GetMachine(context.Background(), w.Machine.ID)
	must(w.tb, err)
	return m
}

// Chain are the ids of the machine's live chain, lowest first.
func (w *World) Chain() []string {
	w.tb.Helper()
	chain, err := w.Catalog.Chain(context.Background(), w.Machine.ID)
	must(w.tb, err)
	var ids []string
	for _, layer := range chain {
		ids = append(ids, layer.ID)
		if _, err := os.Stat(w.Capturer.Path(layer)); err != nil {
			w.tb.Errorf("layer %s of the live chain has no file: %v", layer.ID, err)
		}
	}
	return ids
}

// Enter notes a phase, in the journal too.
func (w *World) Enter(ctx context.Context, phase, _ string, _ any) error {
	if err := w.Catalog.UpdatePhase(ctx, w.Operation, phase, []byte("{}")); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Phases = append(w.Phases, phase)
	return nil
}

// overlays makes overlays that are plain files.
type overlays struct{ world *World }

func (o overlays) Create(_ context.Context, path string, bytes int64) error {
	return o.world.Files.WriteFile(path, fmt.Appendf(nil, "%d", bytes), 0o600)
}

func (o overlays) Seal(_ context.Context, path string) (int64, error) {
	if err := o.world.Files.Chmod(path, 0o400); err != nil {
		return 0, err
	}
	return 4096, o.world.Files.Sync(path)
}

func (o overlays) CheckFile(path string) error {
	data, err := os.ReadFile(path)
	if err == nil && len(data) == 0 {
		err = errors.New("it is empty")
	}
	return err
}

// Source is the double of a run. What is done to it is in Done, in order.
type Source struct {
	world   *World
	running bool
	Done    []string
	// Unclean: the guest stops without having said that it is clean.
	Unclean bool
	// HookFailure is what the guest says of its hooks.
	HookFailure string
	// Unbounded: it does not know how much of its memory it has changed.
	Unbounded bool
	// Fails are what it does not do: "stop", "pause", "switch", "boot", "capture",
	// "capture after the switch", "stage" (it leaves a torn file), "disk" (it does
	// not say), "clock" (it cannot be corrected), and the words of SettleCapture.
	Fails map[string]bool
	// OnStop is called when it is asked to stop, OnCapture at the end of a capture,
	// OnFreeze once the disk is switched.
	OnStop, OnCapture, OnFreeze func()

	// first is the machine's chain before anything was done, disk what is open.
	first, disk []string
	// pages is the memory, by the byte that fills a page; changed are those
	// written since parent, captured what they were before the pending capture.
	pages             map[int64]byte
	changed, captured map[int64]bool
	parent, pending   string
	orders            []capture.CaptureOrder
}

// Orders are the captures it was asked for.
func (s *Source) Orders() []capture.CaptureOrder { return s.orders }

func (s *Source) do(what string) error {
	if s.Fails[what] {
		s.Done = append(s.Done, what+" failed")
		return ErrSource
	}
	s.Done = append(s.Done, what)
	return nil
}

// Running reports whether its guest runs.
func (s *Source) Running() bool { return s.running }

// Stop asks the guest to shut down.
func (s *Source) Stop(context.Context) (bool, error) {
	if s.OnStop != nil {
		s.OnStop()
	}
	if err := s.do("stop"); err != nil {
		return false, err
	}
	s.running = false
	return !s.Unclean, nil
}

// Kill ends the run.
func (s *Source) Kill(context.Context) error {
	s.running = false
	return s.do("kill")
}

// Pause stops the vCPUs.
func (s *Source) Pause(context.Context) error {
	if err := s.do("pause"); err != nil {
		return err
	}
	s.running = false
	return nil
}

// Resume lets the vCPUs go.
func (s *Source) Resume(context.Context) error {
	s.running = true
	return s.do("resume")
}

// SwitchDisk gives the run a new top.
func (s *Source) SwitchDisk(_ context.Context, top catalog.Layer) error {
	if err := s.do("switch"); err != nil {
		return err
	}
	s.disk = append(s.diskNow(), top.ID)
	return nil
}

// Boot begins a run of the recorded chain, as the keeper does.
func (s *Source) Boot(ctx context.Context) error {
	if err := s.do("boot"); err != nil {
		return err
	}
	s.running = true
	s.pages, s.changed, s.parent = map[int64]byte{}, map[int64]bool{}, ""
	s.disk = append([]string{"image"}, s.world.Chain()...)
	runID := durable.NewID()
	if err := s.world.Files.MkdirAll(s.world.Home.Run(runID)); err != nil {
		return err
	}
	return s.world.Catalog.BeginRun(ctx, s.world.Machine.ID, runID)
}
