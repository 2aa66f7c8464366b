package catalog_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// running is an image and a machine m1 that has booted.
func running(t *testing.T) *fixture {
	f := open(t)
	f.image("build1", "debian")
	f.machine("m1", "web")
	f.ok(f.BeginRun(f.ctx, "m1", "run1"))
	f.ok(f.SetMachineState(f.ctx, "m1", machine.Running))
	return f
}

func part(name, machineID, format string) catalog.Layer {
	return catalog.Layer{ID: name, MachineID: machineID, Path: "layers/" + name + "." + format, Format: format, VirtualBytes: 1 << 29}
}

// stage is the beginning of a full checkpoint: its operation, layers and top.
func (f *fixture) stage(m catalog.Machine, ckptID, name string) checkpoint.Checkpoint {
	f.t.Helper()
	op := "op-" + ckptID
	f.admit(op, "checkpoint create", catalog.Claim{Kind: catalog.MachineResource, ID: m.ID})
	f.ok(f.AddOverlay(f.ctx, m.ID, layer(m.ID+"-above-"+ckptID, m.ID)))
	f.ok(f.AddLayers(f.ctx, op, part("mem-"+ckptID, m.ID, "memory"), part("dev-"+ckptID, m.ID, "devices")))
	k := f.draft(m, ckptID, name)
	memory, err := f.MemoryChain(f.ctx, m.ID)
	f.ok(err)
	k.Kind, k.Consistency = checkpoint.Full, checkpoint.Crash
	k.Full = &checkpoint.FullState{
		Devices: "dev-" + ckptID, MemoryBytes: 4711, Tracking: "userfaultfd", Platform: []byte(`{"accelerator":"tcg"}`),
		LinkMagic: strings.Repeat("ab", 16),
	}
	for _, l := range memory {
		k.Full.Memory = append(k.Full.Memory, l.ID)
	}
	k.Full.Memory = append(k.Full.Memory, "mem-"+ckptID)
	return k
}

// full takes a full checkpoint.
func (f *fixture) full(machineID, ckptID, name string) checkpoint.Checkpoint {
	f.t.Helper()
	m, err := f.GetMachine(f.ctx, machineID)
	f.ok(err)
	k := f.stage(m, ckptID, name)
	f.ok(f.PublishCheckpoint(f.ctx, k, k.Layers, catalog.Measured{ID: "dev-" + ckptID, Bytes: 17, Digest: "sha256:00"}))
	f.ok(f.Finish(f.ctx, "op-"+ckptID, catalog.Outcome{State: catalog.OperationDone}))
	return k
}

// suspend takes a full checkpoint and ends the run.
func (f *fixture) suspend(machineID, ckptID string) {
	f.t.Helper()
	f.full(machineID, ckptID, "")
	m, err := f.GetMachine(f.ctx, machineID)
	f.ok(err)
	f.ok(f.EndRun(f.ctx, machineID, m.RunID, machine.Suspended, "suspended"))
}

// memoryIs compares a machine's memory: layers, head and file.
func (f *fixture) memoryIs(machineID, layers, head, file string) {
	f.t.Helper()
	m, err := f.GetMachine(f.ctx, machineID)
	f.ok(err)
	chain, err := f.MemoryChain(f.ctx, machineID)
	f.ok(err)
	if got := layerIDs(chain); got != layers || m.MemoryHead != head || m.MemoryFile != file {
		f.t.Errorf("memory of %s: %q, head %q, file %q; want %q, %q, %q", machineID, got, m.MemoryHead, m.MemoryFile, layers, head, file)
	}
}

func (f *fixture) filesInUse(want string) {
	f.t.Helper()
	list, err := f.MemoryFilesInUse(f.ctx)
	f.ok(err)
	if got := strings.Join(list, " "); got != want {
		f.t.Errorf("memory files in use: %q, want %q", got, want)
	}
}

func TestFullCheckpointComesBackAsPublished(t *testing.T) {
	f := running(t)
	f.full("m1", "c1", "one")
	k := f.full("m1", "c2", "two")
	f.reopen()
	got, err := f.GetCheckpoint(f.ctx, "c2")
	f.ok(err)
	k.CreatedAt = got.CreatedAt
	if diff := cmp.Diff(k, got); diff != "" {
		t.Error(diff)
	}
	f.memoryIs("m1", "mem-c1 mem-c2", "c2", "")
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if m.Head != "c2" || m.State != machine.Running || m.RunID != "run1" {
		t.Errorf("machine %+v", m)
	}
	layers, err := f.GetLayers(f.ctx, "mem-c2", "dev-c2", "m1-above-c1", "m1-above-c2")
	f.ok(err)
	for i, want := range []catalog.Layer{
		{StoredBytes: 4711, State: catalog.LayerSealed},
		{StoredBytes: 17, State: catalog.LayerSealed, Digest: "sha256:00"},
		{State: catalog.LayerSealed},
		{State: catalog.LayerLive}, // the run has switched to it
	} {
		l := layers[i]
		if l.StoredBytes != want.StoredBytes || l.State != want.State || l.Digest != want.Digest {
			t.Errorf("layer %+v, want %+v", l, want)
		}
	}
	f.unreferencedAre("")
	f.filesInUse("")

	// A boot has no memory to count pages since.
	f.ok(f.EndRun(f.ctx, "m1", "run1", machine.Stopped, "guest-shutdown"))
	f.memoryIs("m1", "", "", "")
	f.ok(f.BeginRun(f.ctx, "m1", "run2"))
	f.full("m1", "c3", "")
	f.memoryIs("m1", "mem-c3", "c3", "")
	f.ok(f.BeginRun(f.ctx, "m1", "run3")) // the guest has rebooted
	f.memoryIs("m1", "", "", "")
}

// TestUntrackedFullCheckpointStandsAlone: where nothing says what has changed
// since the parent, a layer with all memory is the whole chain.
func TestUntrackedFullCheckpointStandsAlone(t *testing.T) {
	f := running(t)
	f.full("m1", "c1", "one")
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	k := f.stage(m, "c2", "")
	k.Full.Memory = k.Full.Memory[1:]
	f.ok(f.PublishCheckpoint(f.ctx, k, k.Layers))
	f.memoryIs("m1", "mem-c2", "c2", "")
	f.ok(f.ForgetCheckpoint(f.ctx, "c1", ""))
	f.ok(f.Finish(f.ctx, "op-c2", catalog.Outcome{State: catalog.OperationDone}))
	f.unreferencedAre("dev-c1 mem-c1")
}

func TestPublishRefusesFullCheckpointsThatCouldNotBeRestored(t *testing.T) {
	f := running(t)
	f.full("m1", "c1", "one")
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	good := f.stage(m, "c2", "two")
	for name, bad := range map[string]func(*checkpoint.Checkpoint){
		"no memory":             func(k *checkpoint.Checkpoint) { k.Full.Memory = nil },
		"a hole":                func(k *checkpoint.Checkpoint) { k.Full.Memory = []string{"mem-c1", "mem-c1", "mem-c2"} },
		"another's memory":      func(k *checkpoint.Checkpoint) { k.Full.Memory = []string{"dev-c1", "mem-c2"} },
		"old memory alone":      func(k *checkpoint.Checkpoint) { k.Full.Memory = []string{"mem-c1"} },
		"devices of another":    func(k *checkpoint.Checkpoint) { k.Full.Devices = "dev-c1" },
		"no devices":            func(k *checkpoint.Checkpoint) { k.Full.Devices = "" },
		"memory for devices":    func(k *checkpoint.Checkpoint) { k.Full.Devices = "mem-c2" },
		"devices for memory":    func(k *checkpoint.Checkpoint) { k.Full.Memory = []string{"mem-c1", "dev-c2"} },
		"a disk checkpoint's":   func(k *checkpoint.Checkpoint) { k.Kind = checkpoint.Disk },
		"not all of the disk":   func(k *checkpoint.Checkpoint) { k.Layers = k.Layers[:1] },
		"the top it writes":     func(k *checkpoint.Checkpoint) { k.Layers = append(k.Layers, "m1-above-c2") },
		"a name that is taken":  func(k *checkpoint.Checkpoint) { k.Name = "one" },
		"memory that was never": func(k *checkpoint.Checkpoint) { k.Full.Memory = []string{"none"} },
	} {
		k, state := good, *good.Full
		k.Full = &state
		k.Layers = append([]string{}, good.Layers...)
		bad(&k)
		if err := f.PublishCheckpoint(f.ctx, k, good.Layers); err == nil {
			t.Errorf("%s: published", name)
		}
		f.memoryIs("m1", "mem-c1", "c1", "")
	}
	f.ok(f.PublishCheckpoint(f.ctx, good, good.Layers))
	f.memoryIs("m1", "mem-c1 mem-c2", "c2", "")
}

func TestSuspendedMachine(t *testing.T) {
	f := running(t)
	f.fails(f.EndRun(f.ctx, "m1", "run1", machine.Suspended, ""), errdefs.WrongState, `"web"`)
	f.full("m1", "c1", "one")
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	f.publish(m, "c2", "disk") // its head is no full one then
	f.fails(f.EndRun(f.ctx, "m1", "run1", machine.Suspended, ""), errdefs.WrongState, `"web"`)
	f.suspend("m1", "c3")
	f.reopen()
	m, err = f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if m.State != machine.Suspended || m.Head != "c3" || m.Exit != "suspended" {
		t.Errorf("machine %+v", m)
	}
	f.memoryIs("m1", "mem-c1 mem-c3", "c3", "")
	f.fails(f.ForgetCheckpoint(f.ctx, "c3", ""), errdefs.Referenced, "c3", `"web"`, "holdpoint resume web")
	f.ok(f.ForgetCheckpoint(f.ctx, "c1", ""))
	f.unreferencedAre("dev-c1")

	f.ok(f.BeginIncoming(f.ctx, "m1", "run2"))
	f.memoryIs("m1", "mem-c1 mem-c3", "c3", "mem-c3")
	f.filesInUse("mem-c3")
	f.ok(f.SetMachineState(f.ctx, "m1", machine.Running))
	f.fails(f.BeginIncoming(f.ctx, "m1", "run3"), errdefs.WrongState, `"web"`, "running")
	f.ok(f.ForgetCheckpoint(f.ctx, "c3", ""))
	f.memoryIs("m1", "mem-c1 mem-c3", "c3", "mem-c3") // its pages are counted since
	f.full("m1", "c4", "")
	f.memoryIs("m1", "mem-c1 mem-c3 mem-c4", "c4", "mem-c3") // and the same file is mapped
	f.filesInUse("mem-c3")
	f.ok(f.EndRun(f.ctx, "m1", "run2", machine.Stopped, "killed"))
	f.filesInUse("")
	f.fails(f.BeginIncoming(f.ctx, "m1", "run3"), errdefs.WrongState, "stopped")
}

func TestRestoreOfAFullCheckpoint(t *testing.T) {
	f := running(t)
	f.full("m1", "c1", "one")
	f.full("m1", "c2", "two")
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	disk := f.publish(m, "c3", "three")
	replace := func(op, ck string, full bool) error {
		f.admit(op, "restore", catalog.Claim{Kind: catalog.MachineResource, ID: "m1", Exclusive: true})
		f.ok(f.AddLayer(f.ctx, op, layer("top-"+op, "m1")))
		_, err := f.ReplaceChain(f.ctx, catalog.ReplaceChain{
			MachineID: "m1", OperationID: op, CheckpointID: ck, Top: layer("top-"+op, "m1"), RunID: "run-" + op, Full: full,
		})
		return err
	}
	end := func(op string) {
		f.ok(f.Finish(f.ctx, op, catalog.Outcome{State: catalog.OperationDone}))
	}
	f.fails(replace("op0", disk.ID, true), errdefs.KindMismatch, `"web"`, "c3")
	f.memoryIs("m1", "mem-c1 mem-c2", "c2", "")
	end("op0")
	f.ok(replace("op1", "c1", true))
	f.memoryIs("m1", "mem-c1", "c1", "mem-c1")
	f.chainIs("m1", "m1-0 top-op1")
	f.unreferencedAre("top-op0")
	end("op1")
	f.filesInUse("mem-c1")
	f.ok(replace("op2", "c2", true))
	f.filesInUse("mem-c1 mem-c2") // the source may live until the operation ends
	_, err = f.UndoReplace(f.ctx, "op2")
	f.ok(err)
	f.memoryIs("m1", "mem-c1", "c1", "mem-c1")
	end("op2")
	f.ok(replace("op3", "c2", false)) // its disk alone
	f.memoryIs("m1", "", "", "")
	end("op3")
	f.filesInUse("")
}

// TestUndoOfARestoreOfASuspendedMachine: it is suspended again, and what it
// goes on from has stayed all the time.
func TestUndoOfARestoreOfASuspendedMachine(t *testing.T) {
	f := running(t)
	f.full("m1", "c1", "one")
	f.suspend("m1", "c2")
	f.admit("op1", "restore")
	_, err := f.ReplaceChain(f.ctx, catalog.ReplaceChain{
		MachineID: "m1", OperationID: "op1", CheckpointID: "c1", Top: layer("top", "m1"), RunID: "run2", Full: true,
	})
	f.ok(err)
	f.fails(f.ForgetCheckpoint(f.ctx, "c2", "op1"), errdefs.Referenced, "c2", "holdpoint resume web")
	f.unreferencedAre("")
	_, err = f.UndoReplace(f.ctx, "op1")
	f.ok(err)
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if m.State != machine.Suspended || m.Head != "c2" || m.RunID != "run1" {
		t.Errorf("machine %+v", m)
	}
	f.memoryIs("m1", "mem-c1 mem-c2", "c2", "")
	f.unreferencedAre("top")
}

func TestForks(t *testing.T) {
	f := running(t)
	k := f.full("m1", "c1", "one")
	f.full("m1", "c2", "two")
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	f.publish(m, "c3", "disk")
	fork := func(id, name, ck string) error {
		return f.CreateFork(f.ctx, catalog.Machine{
			ID: id, Name: name, Spec: m.Spec, LinkMagic: k.Full.LinkMagic, State: machine.Running, RemoveOnStop: true,
		}, ck, layer(id+"-top", id))
	}
	f.ok(fork("f1", "try-1", "c1"))
	f.fails(fork("f2", "try-1", "c1"), errdefs.AlreadyExists, `"try-1"`)
	f.fails(fork("f2", "try-2", "none"), errdefs.NotFound, "none")
	f.ok(fork("f2", "try-2", "c3"))
	got, err := f.ResolveMachine(f.ctx, "try-1")
	f.ok(err)
	if got.State != machine.Creating || got.Head != "c1" || got.ForkedFrom != "c1" || !got.RemoveOnStop || got.ImageBuildID != "build1" || got.Spec.CPUs != m.Spec.CPUs {
		t.Errorf("fork %+v", got)
	}
	f.chainIs("f1", "m1-0 f1-top")
	f.memoryIs("f1", "mem-c1", "c1", "mem-c1")
	f.filesInUse("mem-c1")
	f.ok(f.BeginIncoming(f.ctx, "f1", "run-f1"))
	f.ok(f.SetMachineState(f.ctx, "f1", machine.Running))
	f.memoryIs("f2", "", "", "")
	f.fails(f.BeginIncoming(f.ctx, "f2", "run-f2"), errdefs.WrongState, `"try-2"`, "0 memory layers")
	f.ok(f.BeginRun(f.ctx, "f2", "run-f2"))

	// The fork's own checkpoints rest on the source's.
	f.full("f1", "d1", "own")
	d1, err := f.GetCheckpoint(f.ctx, "d1")
	f.ok(err)
	if d1.Parent != "c1" || strings.Join(d1.Full.Memory, " ") != "mem-c1 mem-d1" {
		t.Errorf("checkpoint of the fork %+v", d1)
	}
	f.ok(f.RemoveMachine(f.ctx, "m1", ""))
	d1, err = f.GetCheckpoint(f.ctx, "d1")
	f.ok(err)
	f2, err := f.GetMachine(f.ctx, "f2")
	f.ok(err)
	if d1.Parent != "" || f2.Head != "" || f2.ForkedFrom != "c3" {
		t.Errorf("checkpoint %+v, fork %+v", d1, f2)
	}
	f.memoryIs("f1", "mem-c1 mem-d1", "d1", "mem-c1")
	f.unreferencedAre("dev-c1 dev-c2 mem-c2 m1-above-c3")
	f.ok(f.RemoveMachine(f.ctx, "f1", ""))
	f.ok(f.RemoveMachine(f.ctx, "f2", ""))
	list, err := f.UnreferencedLayers(f.ctx)
	f.ok(err)
	all, err := f.ListLayers(f.ctx)
	f.ok(err)
	if len(list) != len(all) {
		t.Errorf("%d of %d layers can go", len(list), len(all))
	}
}

func TestVerification(t *testing.T) {
	f := running(t)
	f.full("m1", "c1", "one")
	f.full("m1", "c2", "two")
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	unverified := func(want string) {
		t.Helper()
		list, err := f.UnverifiedCheckpoints(f.ctx)
		f.ok(err)
		var ids []string
		for _, k := range list {
			ids = append(ids, k.ID)
		}
		if got := strings.Join(ids, " "); got != want {
			t.Errorf("unverified: %q, want %q", got, want)
		}
	}
	last := func(want string) {
		t.Helper()
		for _, machineID := range []string{"", "m1"} {
			k, err := f.ResolveCheckpoint(f.ctx, machineID, catalog.Last)
			f.ok(err)
			if k.ID != want {
				t.Errorf("last is %s, want %s", k.ID, want)
			}
		}
	}
	unverified("c2 c1")
	last("c2")
	f.ok(f.SetVerification(f.ctx, "c1", checkpoint.Verified, ""))
	f.ok(f.SetVerification(f.ctx, "c2", checkpoint.Failed, "it did not\nanswer"))
	unverified("")
	last("c1")
	k, err := f.GetCheckpoint(f.ctx, "c2")
	f.ok(err)
	if k.Verification != checkpoint.Failed || k.Problem != "it did not answer" {
		t.Errorf("checkpoint %+v", k)
	}

	// So it is with a disk checkpoint, which nobody tries unasked.
	f.publish(m, "c3", "disk")
	unverified("")
	last("c3")
	f.ok(f.SetVerification(f.ctx, "c3", checkpoint.Failed, "layer gone"))
	last("c1")
	f.ok(f.SetVerification(f.ctx, "c3", checkpoint.Verified, ""))
	if k, err = f.GetCheckpoint(f.ctx, "c3"); err != nil || k.Verification != checkpoint.Verified || k.Problem != "" || k.Full != nil {
		t.Errorf("checkpoint %+v, error %v", k, err)
	}
	last("c3")
	f.fails(f.SetVerification(f.ctx, "c9", checkpoint.Verified, ""), errdefs.NotFound, "c9")
}

// TestFullPublishAfterACrashAtAnyStep: the checkpoint is whole or absent, and
// what it would have had is collected once its operation has ended.
func TestFullPublishAfterACrashAtAnyStep(t *testing.T) {
	for k := 0; ; k++ {
		f := running(t)
		m, err := f.GetMachine(f.ctx, "m1")
		f.ok(err)
		f.admit("op1", "checkpoint create")
		crashed := durabletest.CrashAfter(f.fs, k)
		ck := checkpoint.Checkpoint{
			ID: "c1", Kind: checkpoint.Full, MachineID: m.ID, Spec: []byte(`{}`), ImageBuildID: "build1", Layers: []string{"m1-0"},
			Full: &checkpoint.FullState{Memory: []string{"mem"}, Devices: "dev"},
		}
		done := 0
		for _, step := range []func() error{
			func() error { return f.AddOverlay(f.ctx, m.ID, layer("top", m.ID)) },
			func() error {
				return f.AddLayers(f.ctx, "op1", part("mem", "m1", "memory"), part("dev", "m1", "devices"))
			},
			func() error { return f.PublishCheckpoint(f.ctx, ck, ck.Layers) },
			func() error { return f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}) },
		} {
			if err := step(); err != nil {
				if !errors.Is(err, durabletest.ErrCrashed) {
					t.Fatal(err)
				}
				break
			}
			done++
		}
		f.fs.Before = nil
		f.reopen()
		list, err := f.ListCheckpoints(f.ctx, m.ID)
		f.ok(err)
		f.unreferencedAre("")
		if done < 4 {
			f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationFailed}))
		}
		switch {
		case done >= 3:
			f.memoryIs("m1", "mem", "c1", "")
			f.unreferencedAre("")
		case len(list) != 0:
			t.Fatalf("after %d steps: %+v", done, list)
		case done == 2:
			f.unreferencedAre("dev mem")
		}
		f.ok(f.BeginRun(f.ctx, m.ID, "run2")) // the longest chain boots
		if !crashed() {
			return
		}
	}
}
