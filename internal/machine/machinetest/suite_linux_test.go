package machinetest_test

import (
	"testing"

	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest"
)

func TestFakePassesTheSuite(t *testing.T) {
	b := newBench(t)
	layers := 1
	overlay := func(t *testing.T) machine.Layer {
		t.Helper()
		layers++
		l := b.chain[1]
		l.ID = l.ID + "-" + string(rune('a'+layers%26)) + string(rune('a'+layers/26))
		l.Path = b.dir + "/" + l.ID
		must(t, machinetest.FakeOverlays{}.Create(t.Context(), l.Path, 1<<30))
		return l
	}
	machinetest.Suite(t, machinetest.Fixture{
		Hypervisor: b.fake,
		Config: func(t *testing.T) machine.RunConfig {
			cfg := b.config()
			cfg.Disk = []machine.Layer{b.chain[0], overlay(t)}
			return cfg
		},
		Overlay: overlay,
	})
}
