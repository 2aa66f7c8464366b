package catalog_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// restorable is a machine on run1 with the route app at 9090, and a checkpoint
// c1 of it with the routes app at 8080 and foreign.
func restorable(t *testing.T) *fixture {
	f := open(t)
	f.image("build1", "debian")
	m := f.machine("m1", "web")
	f.machine("m2", "api")
	f.ok(f.AddOverlay(f.ctx, "m1", layer("m1-1", "m1")))
	k := f.draft(m, "c1", "one")
	k.Routes = []checkpoint.Route{{Host: "app.localhost", Port: 8080}, {Host: "foreign.localhost", Port: 1}}
	f.ok(f.PublishCheckpoint(f.ctx, k, k.Layers))
	f.ok(f.BeginRun(f.ctx, "m1", "run1"))
	f.ok(f.SetMachineState(f.ctx, "m1", machine.Running))
	f.ok(f.PutRoute(f.ctx, catalog.Route{Host: "app.localhost", MachineID: "m1", Port: 9090}))
	f.ok(f.PutRoute(f.ctx, catalog.Route{Host: "new.localhost", MachineID: "m1", Port: 3000}))
	f.ok(f.PutRoute(f.ctx, catalog.Route{Host: "foreign.localhost", MachineID: "m2", Port: 2}))
	f.admit("op1", "restore", catalog.Claim{Kind: catalog.MachineResource, ID: "m1", Exclusive: true})
	return f
}

func (f *fixture) routesAre(want map[string]int) {
	f.t.Helper()
	list, err := f.ListRoutes(f.ctx, "m1")
	f.ok(err)
	got := map[string]int{}
	for _, r := range list {
		got[r.Host] = r.Port
	}
	if diff := cmp.Diff(want, got); diff != "" {
		f.t.Error(diff)
	}
}

func TestRestoreCommitsAnAnsweringRun(t *testing.T) {
	f := restorable(t)
	f.ok(f.AddLayer(f.ctx, "op1", layer("dest", "m1")))
	f.unreferencedAre("") // staged, leased
	gen, err := f.ReplaceChain(f.ctx, catalog.ReplaceChain{
		MachineID: "m1", OperationID: "op1", CheckpointID: "c1", Top: layer("dest", "m1"), RunID: "run2", RestoreRoutes: true,
	})
	f.ok(err)
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if gen != 1 || m.Generation != 1 || m.RunID != "run2" || m.State != machine.Running || m.Head != "c1" || m.Spec.CPUs != 1 || m.HeldBy != "op1" {
		t.Errorf("generation %d, machine %+v", gen, m)
	}
	f.chainIs("m1", "m1-0 dest")
	f.routesAre(map[string]int{"app.localhost": 8080})
	displaced, err := f.Displaced(f.ctx, "op1")
	f.ok(err)
	if layerIDs(displaced) != "m1-0 m1-1" {
		t.Errorf("displaced %s", layerIDs(displaced))
	}
	f.unreferencedAre("") // the displaced disk is kept
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}))
	f.unreferencedAre("m1-1")
	m, err = f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if m.HeldBy != "" {
		t.Errorf("still held by %s", m.HeldBy)
	}
}

func TestUndoOfARestoreGivesAllBack(t *testing.T) {
	for _, routes := range []bool{true, false} {
		f := restorable(t)
		before, err := f.GetMachine(f.ctx, "m1")
		f.ok(err)
		_, err = f.ReplaceChain(f.ctx, catalog.ReplaceChain{
			MachineID: "m1", OperationID: "op1", CheckpointID: "c1", Top: layer("dest", "m1"), RestoreRoutes: routes,
		})
		f.ok(err)
		_, err = f.ReplaceChain(f.ctx, catalog.ReplaceChain{
			MachineID: "m1", OperationID: "op1", CheckpointID: "c1", Top: layer("again", "m1"),
		})
		f.fails(err, errdefs.WrongState, "op1")
		f.ok(f.ForgetCheckpoint(f.ctx, "c1", "op1")) // the head it had: its undo finds none
		gen, err := f.UndoReplace(f.ctx, "op1")
		f.ok(err)
		after, err := f.GetMachine(f.ctx, "m1")
		f.ok(err)
		if diff := cmp.Diff(before, after, cmpopts.IgnoreFields(catalog.Machine{}, "Generation", "Head")); diff != "" {
			t.Error(diff)
		}
		if gen != 2 || after.Generation != 2 || after.Head != "" {
			t.Errorf("generation %d, machine %+v", gen, after)
		}
		f.chainIs("m1", "m1-0 m1-1")
		f.routesAre(map[string]int{"app.localhost": 9090, "new.localhost": 3000})
		f.unreferencedAre("dest")
		_, err = f.UndoReplace(f.ctx, "op1")
		f.fails(err, errdefs.NotFound, "op1")
	}
}

func TestReplaceChainRefuses(t *testing.T) {
	f := restorable(t)
	_, err := f.ReplaceChain(f.ctx, catalog.ReplaceChain{MachineID: "m2", OperationID: "op1", CheckpointID: "c1", Top: layer("t", "m2")})
	f.fails(err, errdefs.Invalid, "c1", `"api"`)
	_, err = f.ReplaceChain(f.ctx, catalog.ReplaceChain{MachineID: "m1", OperationID: "op1", CheckpointID: "none", Top: layer("t", "m1")})
	f.fails(err, errdefs.NotFound, "none")
	_, err = f.ReplaceChain(f.ctx, catalog.ReplaceChain{MachineID: "m1", OperationID: "op1", CheckpointID: "c1", Top: layer("m1-0", "m1")})
	f.fails(err, errdefs.WrongState, "m1-0")
	f.chainIs("m1", "m1-0 m1-1")
	f.ok(f.AddLayer(f.ctx, "op1", layer("staged", "m1")))
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationFailed}))
	f.unreferencedAre("staged")
}
