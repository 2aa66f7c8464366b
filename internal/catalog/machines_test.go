package catalog_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

func TestMachineComesBackAsRecorded(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	m := f.machine("m1", "web")
	f.reopen()
	want := m
	want.ChainLength = 1
	got, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got.Spec.OnBoot != "nginx" || got.Spec.Tmpfs[0] != "/tmp" || got.CreatedAt.Year() != 2026 || got.LinkMagic == "" {
		t.Errorf("machine %+v", got)
	}
	list, err := f.ListMachines(f.ctx)
	f.ok(err)
	if diff := cmp.Diff([]catalog.Machine{want}, list); diff != "" {
		t.Error(diff)
	}
}

func TestCreateMachineRefuses(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	f.machine("m1", "web")
	create := func(m catalog.Machine, l catalog.Layer) error { return f.CreateMachine(f.ctx, m, l) }
	m := catalog.Machine{ID: "m2", Name: "web", ImageBuildID: "build1", State: machine.Creating}
	f.fails(create(m, layer("l2", "m2")), errdefs.AlreadyExists, `"web"`, "holdpoint rm --force web")
	m.Name, m.ImageBuildID = "api", "none"
	f.fails(create(m, layer("l2", "m2")), errdefs.NotFound, "none", "image ls")
	m.ImageBuildID = "build1"
	f.fails(create(m, layer("m1-0", "m2")), errdefs.AlreadyExists, "m1-0")
	f.ok(create(m, layer("l2", "m2"))) // what was refused left nothing
}

func TestRunOfAMachine(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	m := f.machine("m1", "web")
	f.ok(f.BeginRun(f.ctx, "m1", "run1"))
	f.ok(f.SetMachineState(f.ctx, "m1", machine.Running))
	f.ok(f.AddOverlay(f.ctx, "m1", layer("top", "m1")))
	f.fails(f.EndRun(f.ctx, "m1", "run0", machine.Stopped, "old news"), errdefs.WrongState, "run0", "run1")
	f.ok(f.EndRun(f.ctx, "m1", "run1", machine.Stopped, "guest-shutdown"))
	got, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if got.State != machine.Stopped || got.Exit != "guest-shutdown" || got.RunID != "run1" {
		t.Errorf("machine %+v", got)
	}
	f.ok(f.BeginRun(f.ctx, "m1", "run2")) // boots the longest recorded chain
	chain, err := f.Chain(f.ctx, "m1")
	f.ok(err)
	if chain[0].State != catalog.LayerSealed || chain[1].State != catalog.LayerLive {
		t.Errorf("chain %+v", chain)
	}
	f.fails(f.DropTop(f.ctx, "m1", "top"), errdefs.WrongState, "top")
	f.ok(f.SealLayers(f.ctx, "top"))
	f.fails(f.BeginRun(f.ctx, "m1", "run3"), errdefs.WrongState, `"web"`, "overlay")
	f.ok(f.AddOverlay(f.ctx, m.ID, layer("next", "m1")))
	f.ok(f.DropTop(f.ctx, "m1", "next"))
	f.chainIs("m1", "m1-0 top")
	f.unreferencedAre("next")
	f.ok(f.MeasureLayers(f.ctx, catalog.Measured{ID: "top", Bytes: 77, Digest: "sha256:00"}))
	f.fails(f.MeasureLayers(f.ctx, catalog.Measured{ID: "next", Bytes: 77}), errdefs.WrongState, "next")
	layers, err := f.GetLayers(f.ctx, "top", "m1-0")
	f.ok(err)
	if layerIDs(layers) != "top m1-0" || layers[0].StoredBytes != 77 || layers[0].Digest != "sha256:00" {
		t.Errorf("layers %+v", layers)
	}
	_, err = f.GetLayers(f.ctx, "top", "none")
	f.fails(err, errdefs.NotFound, "none")
}

func TestMissingMachineIsNotFound(t *testing.T) {
	f := open(t)
	for name, err := range map[string]error{
		"state":   f.SetMachineState(f.ctx, "none", machine.Stopped),
		"begin":   f.BeginRun(f.ctx, "none", "r"),
		"end":     f.EndRun(f.ctx, "none", "r", machine.Stopped, ""),
		"overlay": f.AddOverlay(f.ctx, "none", layer("l", "none")),
		"route":   f.PutRoute(f.ctx, catalog.Route{Host: "h", MachineID: "none", Port: 1}),
		"remove":  f.RemoveMachine(f.ctx, "none", ""),
	} {
		if !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	f.unreferencedAre("")
}

func TestRemoveMachineLeavesOnlyLayers(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	web, api := f.machine("m1", "web"), f.machine("m2", "api")
	f.publish(web, "c1", "one")
	f.publish(api, "c2", "two")
	f.ok(f.PutRoute(f.ctx, catalog.Route{Host: "web.localhost", MachineID: "m1", Port: 80}))
	f.admit("op1", "restore", catalog.Claim{Kind: catalog.MachineResource, ID: "m1", Exclusive: true}, catalog.Claim{Kind: catalog.CheckpointResource, ID: "c1"})
	f.fails(f.RemoveMachine(f.ctx, "m1", "op2"), errdefs.Referenced, `"web"`, "op1", "restore")
	_, err := f.ReplaceChain(f.ctx, catalog.ReplaceChain{MachineID: "m1", OperationID: "op1", CheckpointID: "c1", Top: layer("t", "m1")})
	f.ok(err)
	f.ok(f.RemoveMachine(f.ctx, "m1", "op1"))
	f.unreferencedAre("m1-0 m1-above-c1 t")
	f.ok(f.DeleteLayers(f.ctx, "m1-0", "m1-above-c1", "t", "never-was"))
	f.fails(f.DeleteLayers(f.ctx, "m2-0"), errdefs.Referenced, "m2-0")
	routes, err := f.ListRoutes(f.ctx, "")
	f.ok(err)
	list, err := f.ListCheckpoints(f.ctx, "")
	f.ok(err)
	if len(routes) != 0 || len(list) != 1 || list[0].ID != "c2" {
		t.Errorf("routes %v, checkpoints %v", routes, list)
	}
	f.machine("m3", "web") // the name is free again
}

func TestImages(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	web := f.machine("m1", "web")
	f.publish(web, "c1", "one")
	f.publish(web, "c2", "")
	f.image("build2", "debian")
	old, err := f.GetImage(f.ctx, "build1")
	f.ok(err)
	if old.Name != "" || old.UsedBy != 3 || cmp.Diff([]string{"nginx", "python3"}, old.Packages) != "" {
		t.Errorf("older build %+v", old)
	}
	f.image("build1", "") // an image put again without a name keeps what it has
	f.image("build2", "")
	list, err := f.ListImages(f.ctx)
	f.ok(err)
	if len(list) != 2 || list[0].BuildID != "build2" || list[0].Name != "debian" {
		t.Errorf("images %+v", list)
	}
	f.fails(f.RemoveImage(f.ctx, "build1", ""), errdefs.Referenced, "build1", "machine web", "checkpoint one of web", "checkpoint c2 of web")
	f.admit("op1", "run", catalog.Claim{Kind: catalog.ImageResource, ID: "build2"})
	f.fails(f.RemoveImage(f.ctx, "build2", "op2"), errdefs.Referenced, `"debian"`, "op1 (run)")
	f.ok(f.RemoveImage(f.ctx, "build2", "op1"))
	f.fails(f.RemoveImage(f.ctx, "build2", ""), errdefs.NotFound)
	f.ok(f.RemoveMachine(f.ctx, "m1", ""))
	f.ok(f.RemoveImage(f.ctx, "build1", ""))
}

func TestRoutes(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	f.machine("m1", "web")
	f.machine("m2", "api")
	f.ok(f.PutRoute(f.ctx, catalog.Route{Host: "app.localhost", MachineID: "m1", Port: 8080}))
	f.ok(f.PutRoute(f.ctx, catalog.Route{Host: "app.localhost", MachineID: "m1", Port: 9090}))
	f.ok(f.PutRoute(f.ctx, catalog.Route{Host: "api.localhost", MachineID: "m2", Port: 1}))
	f.fails(f.PutRoute(f.ctx, catalog.Route{Host: "app.localhost", MachineID: "m2", Port: 1}), errdefs.Conflict, "app.localhost", `"web"`, "unexpose")
	r, err := f.GetRoute(f.ctx, "app.localhost")
	f.ok(err)
	if r.Port != 9090 || r.Machine != "web" || r.MachineID != "m1" {
		t.Errorf("route %+v", r)
	}
	list, err := f.ListRoutes(f.ctx, "")
	f.ok(err)
	if len(list) != 2 || list[0].Host != "api.localhost" {
		t.Errorf("routes %+v", list)
	}
	f.ok(f.RemoveRoute(f.ctx, "app.localhost"))
	f.fails(f.RemoveRoute(f.ctx, "app.localhost"), errdefs.NotFound, "app.localhost")
	_, err = f.GetRoute(f.ctx, "app.localhost")
	f.fails(err, errdefs.NotFound, "app.localhost")
}

func TestCheckpointComesBackAsPublished(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	m := f.machine("m1", "web")
	f.ok(f.AddOverlay(f.ctx, "m1", layer("top", "m1")))
	k := f.draft(m, "c1", "one")
	k.Automatic, k.CreatedAt = true, f.clock.Now()
	k.Routes = []checkpoint.Route{{Host: "a.localhost", Port: 80, Listening: true}, {Host: "b.localhost", Port: 81}}
	f.ok(f.PublishCheckpoint(f.ctx, k, k.Layers))
	f.reopen()
	got, err := f.GetCheckpoint(f.ctx, "c1")
	f.ok(err)
	if diff := cmp.Diff(k, got); diff != "" {
		t.Error(diff)
	}
	m, err = f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if m.Head != "c1" || m.ChainLength != 2 {
		t.Errorf("machine %+v", m)
	}
}

func TestPublishRefuses(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	m := f.machine("m1", "web")
	f.publish(m, "c1", "one")
	f.ok(f.AddOverlay(f.ctx, "m1", layer("top", "m1")))
	good := f.draft(m, "c2", "two")
	for name, bad := range map[string]func(*checkpoint.Checkpoint){
		"no layers":     func(k *checkpoint.Checkpoint) { k.Layers = nil },
		"a hole":        func(k *checkpoint.Checkpoint) { k.Layers = k.Layers[1:] },
		"an open layer": func(k *checkpoint.Checkpoint) { k.Layers = append(k.Layers, "top") },
		"too many":      func(k *checkpoint.Checkpoint) { k.Layers = append(k.Layers, "top", "more") },
	} {
		k := good
		k.Layers = append([]string{}, good.Layers...)
		bad(&k)
		if err := f.PublishCheckpoint(f.ctx, k, good.Layers); err == nil {
			t.Errorf("%s: published", name)
		}
	}
	taken := good
	taken.Name = "one"
	f.fails(f.PublishCheckpoint(f.ctx, taken, good.Layers), errdefs.AlreadyExists, `"one"`, `"web"`, "checkpoint rm")
	f.fails(f.CheckpointNameFree(f.ctx, m, "one"), errdefs.AlreadyExists, `"one"`)
	f.ok(f.CheckpointNameFree(f.ctx, m, "two"))
	f.ok(f.CheckpointNameFree(f.ctx, m, ""))
	chain, err := f.Chain(f.ctx, "m1")
	f.ok(err)
	if chain[1].State == catalog.LayerSealed {
		t.Error("a refused checkpoint sealed its layer")
	}
	f.ok(f.PublishCheckpoint(f.ctx, good, good.Layers))
	f.publish(m, "c3", "") // without a name, twice
	f.publish(m, "c4", "")
	list, err := f.ListCheckpoints(f.ctx, "m1")
	f.ok(err)
	if len(list) != 4 || list[0].ID != "c4" || list[3].ID != "c1" || len(list[0].Layers) != 4 {
		t.Errorf("checkpoints %+v", list)
	}
}

func TestForgetJoinsTheTree(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	m := f.machine("m1", "web")
	for _, c := range []string{"c1", "c2", "c3"} {
		f.publish(m, c, c)
	}
	f.admit("op1", "restore", catalog.Claim{Kind: catalog.CheckpointResource, ID: "c2"})
	f.fails(f.ForgetCheckpoint(f.ctx, "c2", ""), errdefs.Referenced, "c2", "op1 (restore)")
	f.ok(f.ForgetCheckpoint(f.ctx, "c2", "op1"))
	f.fails(f.ForgetCheckpoint(f.ctx, "c2", ""), errdefs.NotFound, "c2")
	k, err := f.GetCheckpoint(f.ctx, "c3")
	f.ok(err)
	if k.Parent != "c1" {
		t.Errorf("parent %q", k.Parent)
	}
	f.ok(f.ForgetCheckpoint(f.ctx, "c3", ""))
	m, err = f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if m.Head != "c1" {
		t.Errorf("head %q", m.Head)
	}
	f.ok(f.ForgetCheckpoint(f.ctx, "c1", ""))
	m, err = f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if m.Head != "" || m.ChainLength != 4 {
		t.Errorf("machine %+v", m)
	}
	f.unreferencedAre("") // the live chain needs them all
}
