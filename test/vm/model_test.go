package vm_test

import (
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/holdpoint/holdpoint/test/session"
)

// TestModel drives real guests through all that full and disk checkpoints are
// for, in any order, and compares digests of memory and disk after each step.
func TestModel(t *testing.T) {
	a := newAlive(t)
	const start = "test ! -x " + program + " || setsid " + program + " hold " + programDir + " >/dev/null 2>&1 </dev/null &"
	m := &session.Model{
		Session: a.Session, T: t, Run: []string{"--image", "debian", "--memory", "256M", "--cpus", "1", "--on-boot", start},
		Prepare: func(machine string) {
			a.put(t, machine)
			// A full checkpoint's disk alone is that of a power cut.
			a.Must(t, "exec", machine, "--", "sh", "-c", "sync; "+start)
		},
		Write: func(machine string, seed int) { a.ask(t, machine, "write", strconv.Itoa(seed)) },
		Content: func(machine string) session.Content {
			// The on-boot command may still be starting it.
			out := a.Must(t, "exec", machine, "--", "sh", "-c",
				"for i in $(seq 300); do "+program+" ask "+programDir+" digest 2>/dev/null && exit; sleep 0.1; done; exit 1")
			var c session.Content
			decode(t, out, &c)
			return c
		},
	}
	m.Begin()
	// One long life instead of many: each begins with making a machine.
	step := rapid.Custom(func(r *rapid.T) bool { m.Step(r); return true })
	seed := int(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for i := range rounds(t, 30) {
		step.Example(seed + i)
	}
	a.clean(t)
}
