package catalog_test

import (
	"testing"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// rawMachine is a machine that runs on the raw disk "live", and whose operation
// op1 has the copy "kept" of it.
func rawMachine(t *testing.T) (*fixture, catalog.Machine) {
	f := open(t)
	f.image("build1", "debian")
	m := catalog.Machine{
		ID: "r1", Name: "raw", ImageBuildID: "build1", State: machine.Running, Generation: 1, LinkMagic: "0",
		Spec: machine.Spec{DiskFormat: machine.RawDisk},
	}
	f.ok(f.CreateMachine(f.ctx, m, rawLayer("live", "r1")))
	f.ok(f.BeginRun(f.ctx, "r1", "run1"))
	f.admit("op1", "checkpoint create")
	f.ok(f.AddLayer(f.ctx, "op1", rawLayer("kept", "r1")))
	return f, m
}

func rawLayer(name, machineID string) catalog.Layer {
	l := layer(name, machineID)
	l.Format = catalog.RawFormat
	return l
}

func rawDraft(layers ...string) checkpoint.Checkpoint {
	return checkpoint.Checkpoint{
		ID: "c1", MachineID: "r1", Kind: checkpoint.Disk, Consistency: checkpoint.Stopped, Spec: []byte("{}"), ImageBuildID: "build1", Layers: layers,
	}
}

func (f *fixture) refused(what string, err error) {
	f.t.Helper()
	if err == nil {
		f.t.Errorf("%s was recorded", what)
	}
}

// TestRawCheckpoint: the checkpoint of a raw disk has a copy of it, which stays as
// long as it, and the machine its own.
func TestRawCheckpoint(t *testing.T) {
	f, m := rawMachine(t)
	f.refused("a checkpoint with the live disk", f.PublishCheckpoint(f.ctx, rawDraft("live"), []string{"live"}))
	f.refused("one with both", f.PublishCheckpoint(f.ctx, rawDraft("kept", "live"), []string{"kept"}))
	f.refused("one that is not sealed", f.PublishCheckpoint(f.ctx, rawDraft("kept"), nil))
	f.refused("an empty one", f.PublishCheckpoint(f.ctx, rawDraft(), nil))
	f.ok(f.AddLayer(f.ctx, "op1", layer("overlay", "r1")))
	f.refused("one of another format", f.PublishCheckpoint(f.ctx, rawDraft("overlay"), []string{"overlay"}))
	f.ok(f.PublishCheckpoint(f.ctx, rawDraft("kept"), []string{"kept"}))
	f.chainIs(m.ID, "live")
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}))
	f.unreferencedAre("overlay")
	f.ok(f.ForgetCheckpoint(f.ctx, "c1", ""))
	f.unreferencedAre("kept overlay")
}

// TestRawRestoreAndFork: the new top is all of the disk, and only raw goes with raw.
func TestRawRestoreAndFork(t *testing.T) {
	f, m := rawMachine(t)
	f.ok(f.PublishCheckpoint(f.ctx, rawDraft("kept"), []string{"kept"}))
	_, err := f.ReplaceChain(f.ctx, catalog.ReplaceChain{MachineID: m.ID, OperationID: "op1", CheckpointID: "c1", Top: layer("overlay", m.ID)})
	f.refused("an overlay over a raw copy", err)
	f.chainIs(m.ID, "live")
	_, err = f.ReplaceChain(f.ctx, catalog.ReplaceChain{MachineID: m.ID, OperationID: "op1", CheckpointID: "c1", Top: rawLayer("back", m.ID), RunID: "run2"})
	f.ok(err)
	f.chainIs(m.ID, "back")
	f.unreferencedAre("") // live is displaced
	f.ok(f.CreateFork(f.ctx, catalog.Machine{ID: "r2", Name: "try", LinkMagic: "0"}, "c1", rawLayer("own", "r2")))
	f.chainIs("r2", "own")
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}))
	f.unreferencedAre("live")
}
