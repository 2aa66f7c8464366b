package catalog_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// boot publishes what runs as the booted checkpoint of its image.
func (f *fixture) boot(machineID, ckptID, shape string) error {
	f.t.Helper()
	m, err := f.GetMachine(f.ctx, machineID)
	f.ok(err)
	k := f.stage(m, ckptID, "")
	k.Full.Unconfigured = true
	err = f.PublishImageBoot(f.ctx, shape, k, k.Layers, machineID)
	state := catalog.OperationDone
	if err != nil {
		state = catalog.OperationFailed
	}
	f.ok(f.Finish(f.ctx, "op-"+ckptID, catalog.Outcome{State: state}))
	return err
}

func TestImageBoot(t *testing.T) {
	f := running(t)
	_, err := f.ImageBoot(f.ctx, "build1", "2cpu")
	f.fails(err, errdefs.NotFound, "build1")
	f.ok(f.boot("m1", "b1", "2cpu"))
	k, err := f.ImageBoot(f.ctx, "build1", "2cpu")
	f.ok(err)
	if k.ID != "b1" || k.MachineID != "" || k.Parent != "" || !k.Full.Unconfigured || len(k.Layers) != 1 || k.Full.Memory[0] != "mem-b1" {
		t.Errorf("boot %+v", k)
	}
	_, err = f.ImageBoot(f.ctx, "build1", "8cpu")
	f.fails(err, errdefs.NotFound)

	// Its machine goes on since it, and has no checkpoint of it.
	f.memoryIs("m1", "mem-b1", "b1", "")
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if m.Head != "" {
		t.Errorf("head %q", m.Head)
	}
	list, err := f.ListCheckpoints(f.ctx, "")
	f.ok(err)
	unverified, err := f.UnverifiedCheckpoints(f.ctx)
	f.ok(err)
	if len(list) != 0 || len(unverified) != 0 {
		t.Errorf("lists show %v and %v", list, unverified)
	}
	for _, ref := range []string{"b1", catalog.Last} {
		_, err = f.ResolveCheckpoint(f.ctx, "", ref)
		f.fails(err, errdefs.NotFound, ref)
	}
	f.fails(f.ForgetCheckpoint(f.ctx, "b1", ""), errdefs.NotFound, "b1")
	f.full("m1", "c1", "one")
	c1, err := f.GetCheckpoint(f.ctx, "c1")
	f.ok(err)
	if c1.Parent != "" || cmp.Diff([]string{"mem-b1", "mem-c1"}, c1.Full.Memory) != "" {
		t.Errorf("checkpoint %+v", c1)
	}
	f.fails(f.boot("m1", "b2", "2cpu"), errdefs.AlreadyExists, "build1")

	// Another machine begins from it.
	f.ok(f.CreateFork(f.ctx, catalog.Machine{ID: "m2", Name: "api", Spec: m.Spec}, "b1", layer("m2-top", "m2")))
	m2, err := f.GetMachine(f.ctx, "m2")
	f.ok(err)
	if m2.Head != "" || m2.ForkedFrom != "" || m2.State != machine.Creating {
		t.Errorf("machine %+v", m2)
	}
	f.memoryIs("m2", "mem-b1", "b1", "mem-b1")
	f.ok(f.BeginIncoming(f.ctx, "m2", "run2"))

	f.admit("op1", "run", catalog.Claim{Kind: catalog.CheckpointResource, ID: "b1"})
	f.fails(f.DropImageBoot(f.ctx, "b1"), errdefs.Referenced, "b1", "op1 (run)")
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}))
	f.ok(f.DropImageBoot(f.ctx, "b1"))
	f.fails(f.DropImageBoot(f.ctx, "b1"), errdefs.NotFound, "b1")
	f.fails(f.DropImageBoot(f.ctx, "c1"), errdefs.NotFound, "c1")
	f.unreferencedAre("dev-b1 dev-b2 mem-b2")
	f.memoryIs("m2", "mem-b1", "b1", "mem-b1")
	f.ok(f.boot("m1", "b3", "2cpu")) // another may take its place
}

func TestImageGoesWithItsBoots(t *testing.T) {
	f := running(t)
	f.ok(f.boot("m1", "b1", "2cpu"))
	f.ok(f.boot("m1", "b2", "8cpu"))
	img, err := f.GetImage(f.ctx, "build1")
	f.ok(err)
	if img.UsedBy != 1 {
		t.Errorf("used by %d", img.UsedBy)
	}
	f.fails(f.RemoveImage(f.ctx, "build1", ""), errdefs.Referenced, "machine web")
	f.ok(f.RemoveMachine(f.ctx, "m1", ""))
	boots, err := f.ImageBoots(f.ctx, "build1")
	f.ok(err)
	if len(boots) != 2 || boots[0].ID != "b2" {
		t.Errorf("boots %+v", boots)
	}
	f.admit("op1", "run", catalog.Claim{Kind: catalog.CheckpointResource, ID: "b2"})
	f.fails(f.RemoveImage(f.ctx, "build1", ""), errdefs.Referenced, `"debian"`, "op1 (run)")
	f.ok(f.RemoveImage(f.ctx, "build1", "op1"))
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}))
	list, err := f.UnreferencedLayers(f.ctx)
	f.ok(err)
	all, err := f.ListLayers(f.ctx)
	f.ok(err)
	if len(all) == 0 || len(list) != len(all) {
		t.Errorf("%d of %d layers can go", len(list), len(all))
	}
}

func TestPublishImageBootRefuses(t *testing.T) {
	f := running(t)
	f.image("build2", "other")
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	k := f.stage(m, "b1", "")
	other := k
	other.ImageBuildID = "build2"
	f.fails(f.PublishImageBoot(f.ctx, "s", other, k.Layers, "m1"), errdefs.KindMismatch, "build2")
	disk := k
	disk.Full = nil
	f.fails(f.PublishImageBoot(f.ctx, "s", disk, k.Layers, "m1"), errdefs.KindMismatch, "b1")
	f.fails(f.PublishImageBoot(f.ctx, "s", k, k.Layers, "none"), errdefs.NotFound, "none")
	f.ok(f.PublishImageBoot(f.ctx, "s", k, k.Layers, "m1"))
}

// standby records a standby of a checkpoint as a refill does.
func (f *fixture) standby(runID, ck string) {
	f.t.Helper()
	f.admit("fill-"+runID, "fill pool", catalog.Claim{Kind: catalog.CheckpointResource, ID: ck})
	f.ok(f.AddLayer(f.ctx, "fill-"+runID, layer("top-"+runID, "")))
	f.ok(f.AddStandby(f.ctx, catalog.Standby{RunID: runID, CheckpointID: ck, LayerID: "top-" + runID}))
	f.ok(f.Finish(f.ctx, "fill-"+runID, catalog.Outcome{State: catalog.OperationDone}))
}

func TestPools(t *testing.T) {
	f := running(t)
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	f.full("m1", "c1", "one")
	f.publish(m, "c2", "disk")
	f.fails(f.SetPool(f.ctx, "c2", 2), errdefs.KindMismatch, "c2")
	f.fails(f.SetPool(f.ctx, "none", 2), errdefs.NotFound, "none")
	f.ok(f.SetPool(f.ctx, "c1", 2))
	f.ok(f.SetPool(f.ctx, "c1", 3))
	pools, err := f.Pools(f.ctx)
	f.ok(err)
	if diff := cmp.Diff(map[string]int{"c1": 3}, pools); diff != "" {
		t.Error(diff)
	}
	f.standby("r1", "c1")
	f.standby("r2", "c1")
	f.standby("r3", "c1")
	f.admit("op1", "fork")
	f.fails(f.AddStandby(f.ctx, catalog.Standby{RunID: "r4", CheckpointID: "c1", LayerID: "top-r1"}), errdefs.AlreadyExists, "r4", "top-r1")
	f.fails(f.AddStandby(f.ctx, catalog.Standby{RunID: "r4", CheckpointID: "c2", LayerID: "top-r1"}), errdefs.KindMismatch, "c2")
	f.fails(f.AddStandby(f.ctx, catalog.Standby{RunID: "r4", CheckpointID: "c1", LayerID: "none"}), errdefs.NotFound, "none")
	f.unreferencedAre("")
	f.filesInUse("mem-c1")
	f.reopen()

	_, found, err := f.TakeStandby(f.ctx, "op1", "c2")
	if f.ok(err); found {
		t.Error("a standby of another checkpoint was taken")
	}
	s, found, err := f.TakeStandby(f.ctx, "op1", "c1")
	f.ok(err)
	if !found || s.RunID != "r1" || s.LayerID != "top-r1" || s.CreatedAt.IsZero() {
		t.Errorf("took %+v", s)
	}
	f.unreferencedAre("") // leased
	f.ok(f.CreateFork(f.ctx, catalog.Machine{ID: "f1", Name: "try-1", Spec: m.Spec}, "c1", catalog.Layer{ID: s.LayerID}))
	f.chainIs("f1", "m1-0 top-r1")
	chain, err := f.Chain(f.ctx, "f1")
	f.ok(err)
	if top := chain[1]; top.MachineID != "f1" || top.Path != "layers/top-r1.qcow2" {
		t.Errorf("top %+v", top)
	}
	s, found, err = f.TakeStandby(f.ctx, "op1", "c1")
	if f.ok(err); !found || s.RunID != "r2" {
		t.Errorf("took %+v", s)
	}
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationFailed}))
	f.unreferencedAre("top-r2") // it made nothing of it

	list, err := f.Standbys(f.ctx, "")
	f.ok(err)
	if len(list) != 1 || list[0].RunID != "r3" {
		t.Errorf("standbys %+v", list)
	}
	f.fails(f.ForgetCheckpoint(f.ctx, "c1", ""), errdefs.Referenced, "c1", "1 standbys", "checkpoint pool c1 0")
	f.fails(f.RemoveMachine(f.ctx, "m1", ""), errdefs.Referenced, `"web"`, "1 standbys")
	f.ok(f.DropStandby(f.ctx, "r3"))
	f.ok(f.DropStandby(f.ctx, "r3"))
	f.unreferencedAre("top-r2 top-r3")
	f.ok(f.ForgetCheckpoint(f.ctx, "c1", ""))
	pools, err = f.Pools(f.ctx)
	if f.ok(err); len(pools) != 0 {
		t.Errorf("pools %v", pools)
	}
	f.filesInUse("mem-c1") // the fork's
	f.memoryIs("f1", "mem-c1", "c1", "mem-c1")
}

func TestPoolEnds(t *testing.T) {
	f := running(t)
	f.full("m1", "c1", "one")
	f.ok(f.SetPool(f.ctx, "c1", 2))
	f.ok(f.SetPool(f.ctx, "c1", 0))
	f.ok(f.SetPool(f.ctx, "c1", 0))
	pools, err := f.Pools(f.ctx)
	if f.ok(err); len(pools) != 0 {
		t.Errorf("pools %v", pools)
	}
}

// TestFilesOfLeasedCheckpointsAreInUse: between a taken standby and the
// machine that is made of it, only the operation knows of the file.
func TestFilesOfLeasedCheckpointsAreInUse(t *testing.T) {
	f := running(t)
	f.full("m1", "c1", "one")
	f.full("m1", "c2", "two")
	f.filesInUse("")
	f.admit("op1", "fork", catalog.Claim{Kind: catalog.CheckpointResource, ID: "c2"})
	f.filesInUse("mem-c2")
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}))
	f.filesInUse("")
}
