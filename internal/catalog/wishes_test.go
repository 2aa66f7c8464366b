package catalog_test

import (
	"testing"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Rest ends with a machine that runs, and not while somebody is about to stop it.
func TestRest(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	f.machine("m1", "web")
	rests := func(when string, want bool) {
		t.Helper()
		f.ok(f.EndRest(f.ctx, "m1"))
		resting, err := f.AtRest(f.ctx)
		f.ok(err)
		if resting["m1"] != want {
			t.Errorf("%s: at rest is %v", when, !want)
		}
	}
	f.ok(f.SetMachineState(f.ctx, "m1", machine.Stopped))
	f.ok(f.PutToRest(f.ctx, "m1"))
	rests("stopped", true)
	f.ok(f.SetMachineState(f.ctx, "m1", machine.Running))
	f.admit("op1", "stop", catalog.Claim{Kind: catalog.MachineResource, ID: "m1", Exclusive: true})
	rests("about to stop", true)
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}))
	rests("runs", false)
}
