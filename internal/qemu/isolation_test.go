//go:build linux

package qemu

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
	"github.com/holdpoint/holdpoint/internal/qemu/isolation"
	"github.com/holdpoint/holdpoint/internal/qemu/reach"
)

// TestMachinesRunWithoutIsolation takes parts away, as a host may that has not
// got them: what a machine does goes on, and it says so.
func TestMachinesRunWithoutIsolation(t *testing.T) {
	b := newBench(t)
	for name, without := range map[string]isolation.Without{
		"all": nil, "no Landlock": {isolation.Files: "this kernel has no Landlock"},
		"no namespaces": {isolation.Namespaces: "this host refuses them"},
		"nothing":       {isolation.Files: "none", isolation.Calls: "none", isolation.Namespaces: "none"},
	} {
		t.Run(name, func(t *testing.T) {
			b.q.without = without
			defer func() { b.q.without = nil }()
			cfg := b.config(t)
			r := b.launch(t, cfg)
			got := r.Isolation()
			for part, why := range without {
				if want := fmt.Sprintf("%s: %s", part, why); !strings.Contains(strings.Join(got.Missing, "\n"), want) {
					t.Errorf("missing is %q, want %q", got.Missing, want)
				}
			}
			if len(got.By)+len(got.Missing) != 3 {
				t.Errorf("isolation is %+v", got)
			}
			top, merged := b.overlay(t), b.overlay(t)
			must(t, r.SwitchDisk(ctxOf(t), top))
			chain := append(append([]machine.Layer(nil), cfg.Disk...), top)
			must(t, r.ReplaceLayers(ctxOf(t), chain, 1, 2, merged))
			memory, err := r.Memory(ctxOf(t))
			must(t, err)
			must(t, memory.Close())
			if again := reach.Open(cfg.Dir).Isolation(); fmt.Sprint(again) != fmt.Sprint(got) {
				t.Errorf("a successor says %+v, not %+v", again, got)
			}
		})
	}
}

// TestReachFollowsTheDisk looks at which files QEMU has names for.
func TestReachFollowsTheDisk(t *testing.T) {
	b := newBench(t)
	cfg := b.config(t)
	r := b.launch(t, cfg)
	want := func(when string, own, below []string) {
		t.Helper()
		for folder, ids := range map[string][]string{argv.Own: own, "below": below} {
			names, err := filepath.Glob(filepath.Join(cfg.Dir, folder, "l-*"))
			must(t, err)
			got := []string{}
			for _, name := range names {
				got = append(got, filepath.Base(name))
			}
			wanted := []string{}
			for _, id := range ids {
				wanted = append(wanted, disk.NodeName(id))
			}
			if fmt.Sprint(got) != fmt.Sprint(wanted) {
				t.Errorf("%s: in %q is %q, want %q", when, folder, got, wanted)
			}
		}
	}
	first := cfg.Disk[1]
	want("after the start", []string{first.ID}, nil)
	top, merged, again := b.overlay(t), b.overlay(t), b.overlay(t)
	must(t, r.SwitchDisk(ctxOf(t), top))
	want("after a switch", []string{top.ID}, nil)
	if err := r.SwitchDisk(ctxOf(t), machine.Layer{ID: "broken", Path: b.base.Path, Format: "qcow2"}); err == nil {
		t.Error("a raw file became the top")
	}
	want("after a refused switch", []string{top.ID}, nil)
	chain := append(append([]machine.Layer(nil), cfg.Disk...), top)
	must(t, r.ReplaceLayers(ctxOf(t), chain, 1, 2, merged))
	want("after a replacement", []string{top.ID}, []string{merged.ID})
	chain[1] = merged
	must(t, r.ReplaceLayers(ctxOf(t), chain, 1, 2, again))
	want("after another one", []string{top.ID}, []string{again.ID})
	must(t, r.Kill(ctxOf(t)))
	want("after the end", nil, nil)
}

// TestOurEnvironmentStaysOurs keeps secrets in it from QEMU.
func TestOurEnvironmentStaysOurs(t *testing.T) {
	t.Setenv("SOME_API_KEY", "secret")
	t.Setenv("HOLDPOINT_RUN_DIR", "/a/run")
	r := newBench(t)
	run := r.launch(t, r.config(t))
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", run.Process().PID))
	must(t, err)
	if strings.Contains(string(env), "secret") || !strings.Contains(string(env), "HOLDPOINT_RUN_DIR=/a/run") {
		t.Errorf("QEMU's environment is %q", env)
	}
}
