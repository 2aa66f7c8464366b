package catalog_test

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// clock is set by tests; it moves one nanosecond at each look, so that times differ.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time {
	c.now = c.now.Add(1)
	return c.now
}

type fixture struct {
	*catalog.Catalog
	t     testing.TB
	ctx   context.Context
	dir   string
	fs    *durable.FS
	clock *clock
}

func open(t testing.TB) *fixture {
	t.Helper()
	f := &fixture{
		t: t, ctx: context.Background(), dir: t.TempDir(), fs: &durable.FS{},
		clock: &clock{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
	}
	f.reopen()
	t.Cleanup(func() { f.ok(f.Close()) })
	return f
}

func (f *fixture) path() string { return filepath.Join(f.dir, "catalog.db") }

func (f *fixture) reopen() {
	f.t.Helper()
	if f.Catalog != nil {
		f.ok(f.Close())
	}
	c, err := catalog.Open(f.ctx, catalog.Config{Path: f.path(), FS: f.fs, Now: f.clock.Now, KeepOperations: 5})
	f.ok(err)
	f.Catalog = c
}

func (f *fixture) ok(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

// fails wants an error of the kind, in one line that holds all of the parts.
func (f *fixture) fails(err error, kind errdefs.Kind, parts ...string) {
	f.t.Helper()
	if !errdefs.Is(err, kind) {
		f.t.Fatalf("error %v of kind %s, want %s", err, errdefs.KindOf(err), kind)
	}
	if strings.ContainsAny(err.Error(), "\n\r") {
		f.t.Errorf("error of more than one line: %q", err)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			f.t.Errorf("error %q lacks %q", err, p)
		}
	}
}

// id is n padded to an id.
func id(n int) string { return fmt.Sprintf("%016x", n) }

func layer(name, machineID string) catalog.Layer {
	return catalog.Layer{ID: name, MachineID: machineID, Path: "layers/" + name + ".qcow2", Format: "qcow2", VirtualBytes: 1 << 30}
}

func (f *fixture) image(buildID, name string) {
	f.t.Helper()
	f.ok(f.PutImage(f.ctx, catalog.Image{
		BuildID: buildID, Name: name, Architecture: "x86_64", KernelVersion: "6.1",
		DiskBytes: 2 << 30, StoredBytes: 1 << 28, Packages: []string{"nginx", "python3"}, Description: "Debian 12",
	}))
}

// machine makes a machine whose first layer is called ID-0.
func (f *fixture) machine(machineID, name string) catalog.Machine {
	f.t.Helper()
	f.ok(f.CreateMachine(f.ctx, catalog.Machine{
		ID: machineID, Name: name, ImageBuildID: "build1", State: machine.Creating, LinkMagic: strings.Repeat("ab", 16),
		Spec: machine.Spec{MemoryBytes: machine.DefaultMemory, CPUs: 2, DiskBytes: 2 << 30, OnBoot: "nginx", Tmpfs: []string{"/tmp"}, Network: machine.NetworkNone},
	}, layer(machineID+"-0", machineID)))
	m, err := f.GetMachine(f.ctx, machineID)
	f.ok(err)
	return m
}

// publish takes a checkpoint of all layers but the top, after a new top was made.
func (f *fixture) publish(m catalog.Machine, ckptID, name string) checkpoint.Checkpoint {
	f.t.Helper()
	f.ok(f.AddOverlay(f.ctx, m.ID, layer(m.ID+"-above-"+ckptID, m.ID)))
	k := f.draft(m, ckptID, name)
	f.ok(f.PublishCheckpoint(f.ctx, k, k.Layers))
	got, err := f.GetCheckpoint(f.ctx, ckptID)
	f.ok(err)
	return got
}

// draft is a checkpoint of the machine's chain without its top.
func (f *fixture) draft(m catalog.Machine, ckptID, name string) checkpoint.Checkpoint {
	f.t.Helper()
	chain, err := f.Chain(f.ctx, m.ID)
	f.ok(err)
	m, err = f.GetMachine(f.ctx, m.ID)
	f.ok(err)
	k := checkpoint.Checkpoint{
		ID: ckptID, Name: name, Kind: checkpoint.Disk, Consistency: checkpoint.Stopped, Parent: m.Head, MachineID: m.ID,
		Message: "before the agent", Spec: []byte(`{"memory_bytes":536870912,"cpus":1,"disk_bytes":2147483648,"network":"none"}`),
		ImageBuildID: "build1", DiskBytes: 4096, Verification: checkpoint.Unverified,
		Origin: checkpoint.Origin{SessionID: "s", PromptID: "p", ToolCallID: "c", ToolName: "bash", TranscriptOffset: 7},
	}
	for _, l := range chain[:len(chain)-1] {
		k.Layers = append(k.Layers, l.ID)
	}
	return k
}

func (f *fixture) admit(opID, verb string, claims ...catalog.Claim) {
	f.t.Helper()
	_, existing, err := f.Admit(f.ctx, catalog.Operation{ID: opID, RequestID: "request-" + opID, Verb: verb}, time.Minute, claims...)
	f.ok(err)
	if existing {
		f.t.Fatalf("operation %s was there before", opID)
	}
}

func layerIDs(list []catalog.Layer) string {
	var ids []string
	for _, l := range list {
		ids = append(ids, l.ID)
	}
	return strings.Join(ids, " ")
}

func (f *fixture) chainIs(machineID, want string) {
	f.t.Helper()
	chain, err := f.Chain(f.ctx, machineID)
	f.ok(err)
	if got := layerIDs(chain); got != want {
		f.t.Errorf("chain of %s: %s, want %s", machineID, got, want)
	}
}

func (f *fixture) unreferencedAre(want string) {
	f.t.Helper()
	list, err := f.UnreferencedLayers(f.ctx)
	f.ok(err)
	if got := layerIDs(list); got != want {
		f.t.Errorf("unreferenced: %q, want %q", got, want)
	}
}
