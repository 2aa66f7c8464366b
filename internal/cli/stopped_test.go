package cli_test

import (
	"strings"
	"testing"
)

// Of a machine that is stopped nothing is told that did not happen, and that a
// restore starts it is.
func TestStoppedMachine(t *testing.T) {
	f, dir := serve(t)
	f.stopped = true
	r := holdpoint(dir, "", "checkpoint", "create", "web", "--kind", "disk", "--mode", "stopped")
	want := run{0, `checkpoint:    c1000000000000aa
name:          before-agent
kind:          disk stopped
downtime:      none: the machine was stopped, and still is
durable:       after 50 ms
stored:        6 MiB
restore with:  holdpoint restore web before-agent --disk
`, ""}
	if r != want {
		t.Errorf("checkpoint create: %+v", r)
	}
	const starts = "The machine is stopped; it will be started.\n"
	if r := holdpoint(dir, "", "restore", "web", "before-agent", "--disk", "--plan"); !strings.Contains(r.stdout, starts) {
		t.Errorf("restore --plan: %+v", r)
	}
	if r := holdpoint(dir, "", "restore", "web", "before-agent", "--disk", "--plan", "--json"); !strings.Contains(r.stdout, `"starts": true`) {
		t.Errorf("restore --plan --json: %+v", r)
	}
	f.stopped = false
	if r := holdpoint(dir, "", "restore", "web", "before-agent", "--disk", "--plan"); strings.Contains(r.stdout, starts) {
		t.Errorf("restore --plan of a running machine: %+v", r)
	}
}

// What an operation that has ended came to is told, and nothing is asked for.
func TestCancelEndedOperation(t *testing.T) {
	f, dir := serve(t)
	if r := holdpoint(dir, "", "operation", "show", "last"); r.code != 3 || !strings.Contains(r.stderr, "none was begun yet") {
		t.Errorf("operation show last of none: %+v", r)
	}
	f.ops["op-done"] = f.end(machineOperation())
	for _, id := range []string{"op-done", "last"} {
		want := run{5, "", "holdpoint: operation cancel: op-done (start) has ended: done\n"}
		if r := holdpoint(dir, "", "operation", "cancel", id); r != want {
			t.Errorf("operation cancel %s: %+v", id, r)
		}
		if r := holdpoint(dir, "", "operation", "show", id, "-q"); r != (run{0, "op-done\n", ""}) {
			t.Errorf("operation show %s: %+v", id, r)
		}
	}
	if n := len(f.asks()); n != 0 {
		t.Errorf("%d requests came to change something", n)
	}
}
