package catalog_test

import (
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestResolve(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	f.image("build2", "debian-12")
	web, web2 := f.machine("a1b2", "web"), f.machine("a1c3", "web-2")
	f.machine("ffff", "a1b2") // called as the first one's id
	for _, c := range []struct {
		m        catalog.Machine
		id, name string
	}{{web, "c001", "before"}, {web, "c002", "before-2"}, {web2, "c003", "before"}, {web2, "d004", ""}} {
		f.publish(c.m, c.id, c.name)
	}
	f.admit("e001", "run")
	f.admit("e002", "run")
	machine := func(ref string) (string, error) { m, err := f.ResolveMachine(f.ctx, ref); return m.ID, err }
	image := func(ref string) (string, error) { i, err := f.ResolveImage(f.ctx, ref); return i.BuildID, err }
	operation := func(ref string) (string, error) { o, err := f.ResolveOperation(f.ctx, ref); return o.ID, err }
	ckpt := func(machineID string) func(string) (string, error) {
		return func(ref string) (string, error) {
			k, err := f.ResolveCheckpoint(f.ctx, machineID, ref)
			return k.ID, err
		}
	}
	const invalid, missing = string(errdefs.Invalid), string(errdefs.NotFound)
	for _, c := range []struct {
		find      func(string) (string, error)
		ref, want string // an id, or a kind and what the error holds
	}{
		{machine, "web", "a1b2"},  // exact name beats prefix
		{machine, "web-", "a1c3"}, // prefix of a name
		{machine, "a1c", "a1c3"},  // prefix of an id
		{machine, "a1c3", "a1c3"}, // id
		{machine, "a1b2", "ffff"}, // exact name beats exact id
		{machine, "we", invalid + ` web (a1b2), web-2 (a1c3)`},
		{machine, "a1", invalid + ` a1b2 (ffff), web (a1b2), web-2 (a1c3)`},
		{machine, "nope", missing + ` "nope" holdpoint ls`},
		{machine, "%", missing},
		{machine, "web_", missing},
		{machine, "WEB", missing},
		{machine, "", invalid + " no name given"},
		{machine, "last", "ffff"}, // made last
		{image, "debian", "build1"},
		{image, "debian-", "build2"},
		{image, "build2", "build2"},
		{image, "build", invalid + " debian (build1) debian-12 (build2)"},
		{image, "last", missing + " holdpoint image ls"},
		{image, "", invalid},
		{operation, "e001", "e001"},
		{operation, "e00", invalid + " e001 e002"},
		{operation, "x", missing},
		{operation, "", invalid},
		{ckpt(""), "before", invalid + " before of web (c001) before of web-2 (c003) name its machine"},
		{ckpt("a1b2"), "before", "c001"},
		{ckpt("a1c3"), "before", "c003"},
		{ckpt("a1b2"), "before-", "c002"},
		{ckpt(""), "before-2", "c002"},
		{ckpt(""), "c003", "c003"},
		{ckpt(""), "d", "d004"},
		{ckpt(""), "c00", invalid + " before of web (c001) type more"},
		{ckpt("a1b2"), "d004", invalid + ` "d004" belongs to machine "web-2"`},
		{ckpt("a1b2"), "zzz", missing + " checkpoint ls web"},
		{ckpt(""), "zzz", missing + " checkpoint ls"},
		{ckpt(""), "", invalid},
		{ckpt(""), "last", "d004"},
		{ckpt("a1b2"), "last", "c002"},
		{ckpt("ffff"), "last", missing},
	} {
		got, err := c.find(c.ref)
		kind, parts, _ := strings.Cut(c.want, " ")
		if err == nil {
			if got != c.want {
				t.Errorf("%q: found %s, want %s", c.ref, got, c.want)
			}
			continue
		}
		if string(errdefs.KindOf(err)) != kind {
			t.Errorf("%q: %v (%s), want %s", c.ref, err, errdefs.KindOf(err), c.want)
		}
		for _, p := range strings.Fields(parts) {
			if !strings.Contains(err.Error(), p) {
				t.Errorf("%q: error %q lacks %q", c.ref, err, p)
			}
		}
	}
}

// Who has no image is told how to make one.
func TestNoImageYet(t *testing.T) {
	f := open(t)
	_, err := f.ResolveImage(f.ctx, "mine")
	f.fails(err, errdefs.NotFound, "holdpoint image build debian")
}

func TestLast(t *testing.T) {
	f := open(t)
	_, err := f.ResolveMachine(f.ctx, "last")
	f.fails(err, errdefs.NotFound, `"last"`)
	_, err = f.ResolveCheckpoint(f.ctx, "", "last")
	f.fails(err, errdefs.NotFound, `"last"`)
	f.image("build1", "debian")
	web := f.machine("m1", "web")
	f.machine("m2", "api")
	f.ok(f.UseMachine(f.ctx, "m1"))
	m, err := f.ResolveMachine(f.ctx, "last")
	f.ok(err)
	if m.ID != "m1" {
		t.Errorf("last machine %s", m.ID)
	}
	f.publish(web, "c1", "one")
	f.publish(web, "c2", "two")
	f.ok(f.UseCheckpoint(f.ctx, "m1", "c1"))
	f.ok(f.ForgetCheckpoint(f.ctx, "c1", ""))
	k, err := f.ResolveCheckpoint(f.ctx, "", "last") // the newest, when the last is gone
	f.ok(err)
	if k.ID != "c2" {
		t.Errorf("last checkpoint %s", k.ID)
	}
	f.ok(f.RemoveMachine(f.ctx, "m1", ""))
	_, err = f.ResolveMachine(f.ctx, "last")
	f.fails(err, errdefs.NotFound, `"last"`)
}
