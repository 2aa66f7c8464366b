package vm_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestFullCheckpoints takes a program that has something to lose through
// everything that a full checkpoint is for.
func TestFullCheckpoints(t *testing.T) {
	a := newAlive(t)
	a.start(t, "web", "--on-boot", "true")
	a.mark(t, "web", "one")
	before := a.check(t, "web", report{})
	var after report

	ok := t.Run("capture and continue", func(t *testing.T) {
		first := a.checkpoint(t, "web", "one")
		if first.Checkpoint.Kind != "full" || first.DowntimeMS <= 0 || first.DurableMS < first.DowntimeMS {
			t.Errorf("got %+v", first)
		}
		after = a.awaitProgress(t, "web", before)
		a.mark(t, "web", "two")
		second := a.checkpoint(t, "web", "two")
		if second.Checkpoint.Parent != first.Checkpoint.ID {
			t.Errorf("the parent of two is %s, not %s", second.Checkpoint.Parent, first.Checkpoint.ID)
		}
		after = a.awaitProgress(t, "web", after)
		a.clean(t)
	})
	ok = ok && t.Run("restore", func(t *testing.T) { a.testRestore(t, before, after) })
	ok = ok && t.Run("fork", func(t *testing.T) { a.testFork(t, before, after) })
	ok = ok && t.Run("verify", func(t *testing.T) {
		a.Must(t, "checkpoint", "verify", "one")
		a.Must(t, "checkpoint", "verify", "two")
	})
	if ok {
		t.Run("suspend and resume", a.testSuspend)
	}
}

// isIsolated looks at what keeps the machine's QEMU from the rest of the host.
func (a alive) isIsolated(t *testing.T, name string) {
	t.Helper()
	var v struct {
		Machine struct {
			By []string `json:"isolated_by"`
		}
	}
	a.JSON(t, &v, "inspect", name)
	if len(v.Machine.By) == 0 {
		t.Errorf("nothing isolates %s", name)
	}
}

// testRestore goes back to the first checkpoint, and undoes that.
func (a alive) testRestore(t *testing.T, before, after report) {
	id := a.Must(t, "exec", "web", "--", "cat", "/etc/machine-id")
	var restored struct {
		Safety struct{ ID, Kind string }
	}
	a.JSON(t, &restored, "restore", "web", "one", "--full", "--yes")
	a.isAt(t, "web", "one", before)
	if now := a.Must(t, "exec", "web", "--", "cat", "/etc/machine-id"); now != id {
		t.Errorf("the machine's id was %s and is %s", id, now)
	}
	a.checkClock(t, "web")
	if restored.Safety.Kind != "full" {
		t.Errorf("what was discarded is kept as %+v", restored.Safety)
	}
	a.Must(t, "restore", "web", restored.Safety.ID, "--full", "--yes")
	a.isAt(t, "web", "two", after)
	a.clean(t)
}

// forked is what `fork` says.
type forked struct {
	Machines []struct{ Name, ID, State string }
}

// testFork lets three machines go on from the first checkpoint.
func (a alive) testFork(t *testing.T, before, after report) {
	var f forked
	a.JSON(t, &f, "fork", "one", "--count", "3", "--name", "try")
	if len(f.Machines) != 3 {
		t.Fatalf("got %+v", f)
	}
	names := []string{"web"}
	for i, m := range f.Machines {
		if want := fmt.Sprintf("try-%d", i+1); m.Name != want {
			t.Errorf("a fork is called %s, not %s", m.Name, want)
		}
		a.checkClock(t, m.Name)
		a.isAt(t, m.Name, "one", before)
		a.isIsolated(t, m.Name)
		names = append(names, m.Name)
	}
	a.check(t, "web", after)
	// All that has to differ, by the command that shows it; the first asks a
	// process that existed when the checkpoint was taken.
	for what, command := range map[string][]string{
		"getrandom": {program, "ask", programDir, "draw"},
		"uuid":      {"python3", "-c", "import uuid; print(uuid.uuid4())"},
		"kernel":    {"cat", "/proc/sys/kernel/random/uuid"},
		"ssh-keygen": {
			"sh", "-c", "rm -f /root/key; ssh-keygen -q -t ed25519 -N '' -C '' -f /root/key && cat /root/key.pub",
		},
		"host name":  {"hostname"},
		"machine-id": {"cat", "/etc/machine-id"},
	} {
		seen := map[string]string{}
		for _, name := range names {
			got := a.Must(t, append([]string{"exec", name, "--"}, command...)...)
			if other, ok := seen[got]; ok {
				t.Errorf("%s: %s and %s have the same: %s", what, other, name, got)
			}
			seen[got] = name
		}
	}
	a.Must(t, "exec", "try-1", "--", "sh", "-c", "echo one >/mine; sync")
	for _, name := range []string{"web", "try-2"} {
		if r, err := a.Run("exec", name, "--", "test", "-e", "/mine"); err != nil || r.Code != 1 {
			t.Errorf("%s sees what try-1 wrote: %+v, %v", name, r, err)
		}
	}
	out := strings.Fields(a.Must(t, "fork", "one", "--count", "2", "--name", "indexed", "--", "sh", "-c", "echo index=$FORK_INDEX"))
	for _, want := range []string{"index=1", "index=2"} {
		if !slices.ContainsFunc(out, func(s string) bool { return strings.HasSuffix(s, want) }) {
			t.Errorf("no %s in %q", want, out)
		}
	}
	for _, name := range []string{"try-1", "try-2", "try-3", "indexed-1", "indexed-2"} {
		a.Must(t, "rm", name, "--force")
	}
	a.check(t, "web", after)
	a.clean(t)
}

// testSuspend ends the machine's process, and goes on later.
func (a alive) testSuspend(t *testing.T) {
	before := a.check(t, "web", report{})
	var first, second struct {
		Checkpoint struct{ ID string }
		Machine    struct{ State string }
	}
	a.JSON(t, &first, "suspend", "web")
	if n := a.machineProcesses(t); n != 0 {
		t.Errorf("%d machine processes are left", n)
	}
	a.clean(t)
	a.JSON(t, &second, "suspend", "web")
	if first.Checkpoint.ID == "" || first.Checkpoint.ID != second.Checkpoint.ID {
		t.Errorf("a machine was suspended as %+v, and then as %+v", first, second)
	}
	a.Must(t, "resume", "web")
	a.checkClock(t, "web")
	a.isAt(t, "web", "two", before)
	a.awaitProgress(t, "web", before)
	a.clean(t)
}

func (a alive) machineProcesses(t *testing.T) int {
	t.Helper()
	procs, err := a.Processes()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, p := range procs {
		if p.IsMachine() {
			n++
		}
	}
	return n
}

// clockError is how far a guest's clock may be from the host's.
const clockError = 100 * time.Millisecond

// checkClock compares the guest's wall clock, as the first command there sees
// it, with the host's.
func (a alive) checkClock(t *testing.T, machine string) {
	t.Helper()
	before := time.Now()
	text := strings.TrimSpace(a.Must(t, "exec", machine, "--", "date", "+%s%N"))
	after := time.Now()
	nano, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	guest := time.Unix(0, nano)
	if guest.Before(before.Add(-clockError)) || guest.After(after.Add(clockError)) {
		t.Errorf("the clock of %s is %s, the host's was %s to %s", machine, guest.Format(time.StampMicro),
			before.Format(time.StampMicro), after.Format(time.StampMicro))
	}
}

// TestCommandsLiveOn: what ran at the checkpoint runs on in each restore and
// fork, and can be attached to; who is attached at a restore is told.
func TestCommandsLiveOn(t *testing.T) {
	a := newAlive(t)
	a.start(t, "web")
	var detached struct{ Command struct{ ID string } }
	decode(t, a.Must(t, "exec", "web", "--detach", "--json", "--", "sh", "-c",
		"echo before; while ! test -e /go; do sleep 0.1; done; echo after; exit 3"), &detached)
	a.checkpoint(t, "web", "one")

	session1 := a.Command("exec", "web", "--", "sh", "-c", "touch /attached; exec sleep 1000")
	var said strings.Builder
	session1.Stderr = &said
	if err := session1.Start(); err != nil {
		t.Fatal(err)
	}
	a.Must(t, "exec", "web", "--", "sh", "-c", "while ! test -e /attached; do sleep 0.1; done")
	a.Must(t, "restore", "web", "one", "--full", "--yes")
	err := session1.Wait()
	if code := session1.ProcessState.ExitCode(); err == nil || code != 125 {
		t.Errorf("who was attached at the restore ends with code %d, %v: %s", code, err, said.String())
	}
	a.Must(t, "fork", "one", "--name", "try")
	for _, machine := range []string{"web", "try-1"} {
		a.Must(t, "exec", machine, "--", "touch", "/go")
		r, err := a.Run("attach", machine, detached.Command.ID)
		if err != nil || r.Code != 3 || r.Stdout != "before\nafter\n" {
			t.Errorf("in %s the command ended with %d, %v: %q %s", machine, r.Code, err, r.Stdout, r.Stderr)
		}
	}
	a.clean(t)
}

// TestEndsDuringCapture: the guest reboots, panics or powers off while a
// checkpoint is taken. There is one or there is none; the machine is what it
// would be without.
func TestEndsDuringCapture(t *testing.T) {
	a := newAlive(t)
	a.start(t, "web")
	a.checkpoint(t, "web", "zero")
	for name, trigger := range map[string]string{"reboot": "b", "panic": "c", "poweroff": "o"} {
		for _, delay := range []string{"0", "0.2"} {
			t.Run(name+" after "+delay, func(t *testing.T) { a.endDuringCapture(t, trigger, delay) })
		}
	}
}

func (a alive) endDuringCapture(t *testing.T, trigger, delay string) {
	before := a.check(t, "web", report{})
	a.Must(t, "exec", "web", "--detach", "--", "sh", "-c", "touch /run/this-boot; sleep "+delay+"; echo "+trigger+" >/proc/sysrq-trigger")
	var c created
	r, err := a.Run("checkpoint", "create", "web", "--json")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("exit code %d %s", r.Code, r.Stderr)
	// A guest that is up again, or a machine that is down.
	await(t, func() error {
		var v struct{ Machine struct{ State string } }
		a.JSON(t, &v, "inspect", "web")
		if v.Machine.State == "stopped" {
			a.Must(t, "start", "web")
		}
		r, err := a.Run("exec", "web", "--", "test", "!", "-e", "/run/this-boot")
		if err == nil && r.Code != 0 {
			err = fmt.Errorf("the guest of before is still there: machine %s, %s", v.Machine.State, r.Stderr)
		}
		return err
	})
	a.clean(t)
	back := "zero"
	if r.Code == 0 {
		decode(t, r.Stdout, &c)
		back = c.Checkpoint.ID
		before = a.restoredTo(t, back, before)
	} else {
		a.Must(t, "restore", "web", back, "--full", "--yes", "--no-safety")
		before = a.check(t, "web", report{})
	}
	a.awaitProgress(t, "web", before)
	a.clean(t)
}

// restoredTo restores a checkpoint that was published while the guest ended.
func (a alive) restoredTo(t *testing.T, id string, before report) report {
	t.Helper()
	// It may have been taken an instant before the end, which then comes again:
	// before the guest has answered, or after.
	r, err := a.Run("restore", "web", id, "--full", "--yes", "--no-safety")
	if err == nil && r.Code == 0 {
		r, err = a.Run("exec", "web", "--", program, "ask", programDir, "report", before.text)
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.Code == 0 {
		got := report{text: strings.TrimSpace(r.Stdout)}
		decode(t, got.text, &got)
		if len(got.Problems) > 0 {
			t.Errorf("restored while it ended: %v", got.Problems)
		}
	}
	a.Must(t, "restore", "web", "zero", "--full", "--yes", "--no-safety")
	return a.check(t, "web", report{})
}
