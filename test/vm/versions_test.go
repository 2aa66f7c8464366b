package vm_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// otherVariable names a folder with qemu-system-x86_64 and qemu-img of another
// line than the first in PATH.
const otherVariable = "HOLDPOINT_TEST_QEMU_OTHER"

// TestOtherQEMU takes full checkpoints from one QEMU line to another and back:
// what the other one took is refused by name and nothing has changed, its disk
// alone can be had, and nothing is lost for the line that took it.
func TestOtherQEMU(t *testing.T) {
	dir := os.Getenv(otherVariable)
	if dir == "" {
		t.Skipf("%s is not set; run make test-versions", otherVariable)
	}
	a := newAlive(t)
	here, there := lineOf(t, "qemu-system-x86_64"), lineOf(t, filepath.Join(dir, "qemu-system-x86_64"))
	if here == there {
		t.Fatalf("both are of the line %s", here)
	}
	t.Logf("from %s to %s and back", here, there)
	a.start(t, "web")
	own := a.take(t, "own", here)
	a.Must(t, "run", "nap", "--image", "debian", "--memory", "256M")
	a.Must(t, "exec", "nap", "--", "sh", "-c", "echo kept >/run/kept")
	a.Must(t, "suspend", "nap")

	ok := t.Run("other accelerator", func(t *testing.T) { a.testOtherAccelerator(t, own) })
	a.restartDaemon(t, "PATH="+dir+":"+os.Getenv("PATH"))
	ok = ok && t.Run(here+" refused by "+there, func(t *testing.T) {
		a.refusedHere(t, own, "QEMU line is "+here+", here it is "+there)
		a.refused(t, "its QEMU line is "+here+", here it is "+there, "resume", "nap")
		if state := a.inspect(t, "nap").State; state != "suspended" {
			t.Errorf("a machine that was not resumed is %s", state)
		}
	})
	ok = ok && t.Run("disk of "+here+" on "+there, func(t *testing.T) { a.restoreDisk(t, own, there) })
	var other taken
	ok = ok && t.Run("all on "+there, func(t *testing.T) {
		other = a.take(t, "other", there)
		a.testLine(t, other)
	})
	a.restartDaemon(t, "PATH="+os.Getenv("PATH"))
	ok = ok && t.Run(there+" refused by "+here, func(t *testing.T) {
		a.refusedHere(t, other, "QEMU line is "+there+", here it is "+here)
	})
	ok = ok && t.Run("disk of "+there+" on "+here, func(t *testing.T) { a.restoreDisk(t, other, here) })
	if ok {
		t.Run("nothing is lost for "+here, func(t *testing.T) {
			a.testLine(t, own)
			a.Must(t, "resume", "nap")
			if got := strings.TrimSpace(a.Must(t, "exec", "nap", "--", "cat", "/run/kept")); got != "kept" {
				t.Errorf("the suspended machine's memory has %q", got)
			}
			a.clean(t)
		})
	}
}

var versionPattern = regexp.MustCompile(`version (\d+\.\d+)\.`)

// lineOf is the line of a QEMU binary.
func lineOf(t *testing.T, binary string) string {
	t.Helper()
	out, err := exec.Command(binary, "--version").CombinedOutput()
	m := versionPattern.FindSubmatch(out)
	if err != nil || m == nil {
		t.Fatalf("%s --version: %v: %s", binary, err, out)
	}
	return string(m[1])
}

// restartDaemon lets a daemon take over that has this in its environment.
// Machines run on with the QEMU they have.
func (a alive) restartDaemon(t *testing.T, variable string) {
	t.Helper()
	a.Must(t, "daemon", "stop")
	a.Env = append(a.Env, variable) // the last one of a name counts
	a.Must(t, "daemon", "start")
}

// taken is a full checkpoint of the machine web.
type taken struct {
	name string
	at   report
}

// take marks the machine web and takes a full checkpoint of it, on that QEMU line.
func (a alive) take(t *testing.T, name, line string) taken {
	t.Helper()
	a.mark(t, "web", name)
	at := a.awaitProgress(t, "web", a.check(t, "web", report{}))
	a.checkpoint(t, "web", name)
	if got := a.listed(t, name).Platform.Hypervisor; got != line {
		t.Fatalf("checkpoint %s rests on QEMU %q, not on %s", name, got, line)
	}
	return taken{name, at}
}

// listed is a checkpoint as it is listed.
type listed struct {
	ID, Name, Verification string
	Platform               struct{ Hypervisor, Accelerator string }
}

func (a alive) list(t *testing.T) []listed {
	t.Helper()
	var v struct{ Checkpoints []listed }
	a.JSON(t, &v, "checkpoint", "ls", "web")
	return v.Checkpoints
}

func (a alive) listed(t *testing.T, name string) listed {
	t.Helper()
	all := a.list(t)
	i := slices.IndexFunc(all, func(k listed) bool { return k.Name == name })
	if i < 0 {
		t.Fatalf("checkpoint %s is not in %+v", name, all)
	}
	return all[i]
}

// inspected is a machine, as far as these tests look into it.
type inspected struct {
	State       string
	Generation  uint64
	RunID       string `json:"run_id"`
	QEMUVersion string `json:"qemu_version"`
	QEMUPID     int64  `json:"qemu_pid"`
}

func (a alive) inspect(t *testing.T, machine string) inspected {
	t.Helper()
	var v struct{ Machine inspected }
	a.JSON(t, &v, "inspect", machine)
	return v.Machine
}

// refused wants a command line to be refused as INCOMPATIBLE, in a last line
// that says so.
func (a alive) refused(t *testing.T, says string, args ...string) {
	t.Helper()
	r, err := a.Run(args...)
	lines := strings.Split(strings.TrimSpace(r.Stderr), "\n")
	last := lines[len(lines)-1]
	if err != nil || r.Code != 6 || !strings.HasPrefix(last, "holdpoint: ") || !strings.Contains(last, says) {
		t.Errorf("holdpoint %s: exit code %d, %v: %q; want 6 and %q", strings.Join(args, " "), r.Code, err, r.Stderr, says)
		return
	}
	var v struct {
		Operations []struct {
			Verb  string
			Error *struct{ Kind, Message string }
		}
	}
	a.JSON(t, &v, "operation", "ls", "--all")
	// One that is refused before it is admitted leaves no operation.
	for _, op := range v.Operations {
		if op.Error != nil && strings.Contains(op.Error.Message, says) && op.Error.Kind != "INCOMPATIBLE" {
			t.Errorf("%s was refused as %s: %s", op.Verb, op.Error.Kind, op.Error.Message)
		}
	}
}

// refusedHere wants nothing here to continue from a checkpoint, and nothing to
// have changed after that.
func (a alive) refusedHere(t *testing.T, k taken, why string) {
	t.Helper()
	a.mark(t, "web", "since-"+k.name)
	since := a.check(t, "web", report{})
	machine, checkpoints, machines := a.inspect(t, "web"), a.list(t), a.Must(t, "ls", "--quiet")
	says := "cannot be continued here: its " + why + "; its disk alone, as after a power cut: holdpoint restore "
	a.refused(t, says, "restore", "web", k.name, "--full", "--yes")
	a.refused(t, says, "fork", k.name, "--name", "try")
	a.refused(t, says, "checkpoint", "verify", k.name)
	if got := a.inspect(t, "web"); got != machine {
		t.Errorf("the machine was %+v and is %+v", machine, got)
	}
	if got := a.Must(t, "ls", "--quiet"); got != machines {
		t.Errorf("the machines were %q and are %q", machines, got)
	}
	// What cannot be continued here is no worse for that.
	if got := a.list(t); !slices.EqualFunc(got, checkpoints, func(x, y listed) bool { return x.ID == y.ID && x.Verification != "failed" }) {
		t.Errorf("the checkpoints were %+v and are %+v", checkpoints, got)
	}
	a.awaitProgress(t, "web", since)
	a.isAt(t, "web", "since-"+k.name, since)
	a.clean(t)
}

// testOtherAccelerator: the daemon would run machines under the other
// accelerator. Nothing is run under it, so that any host will do.
func (a alive) testOtherAccelerator(t *testing.T, k taken) {
	is := a.listed(t, k.name).Platform.Accelerator
	other := map[string]string{"tcg": "kvm", "kvm": "tcg"}[is]
	a.restartDaemon(t, "HOLDPOINT_ACCEL="+other)
	a.refusedHere(t, k, "accelerator is "+is+", here it is "+other)
	a.restartDaemon(t, "HOLDPOINT_ACCEL="+os.Getenv("HOLDPOINT_ACCEL"))
	a.clean(t)
}

// restoreDisk boots the machine web from the disk of a full checkpoint of
// another line, and starts the program again.
func (a alive) restoreDisk(t *testing.T, k taken, line string) {
	t.Helper()
	before := a.inspect(t, "web")
	a.Must(t, "restore", "web", k.name, "--disk", "--yes")
	if got := strings.TrimSpace(a.Must(t, "exec", "web", "--", "cat", "/mark")); got != k.name {
		t.Errorf("the disk is at %q, not at %q", got, k.name)
	}
	a.runs(t, "web", line)
	if got := a.inspect(t, "web"); got.Generation <= before.Generation {
		t.Errorf("generation %d became %d", before.Generation, got.Generation)
	}
	a.Must(t, "exec", "web", "--", "rm", "-rf", programDir)
	a.put(t, "web") // its file may not have been synced
	a.Must(t, "exec", "web", "--detach", "--", program, "run", programDir)
	a.awaitProgram(t, "web")
	a.clean(t)
}

// runs wants a machine to run on that QEMU line.
func (a alive) runs(t *testing.T, machine, line string) {
	t.Helper()
	if got := a.inspect(t, machine); got.State != "running" || !strings.HasPrefix(got.QEMUVersion, line+".") {
		t.Errorf("machine %s is %s on QEMU %s, not running on %s", machine, got.State, got.QEMUVersion, line)
	}
}

// testLine does with a checkpoint what the line that took it can do: restore,
// fork, prove. A new machine is none of the other line's first boot.
func (a alive) testLine(t *testing.T, k taken) {
	t.Helper()
	a.mark(t, "web", "later")
	line := a.listed(t, k.name).Platform.Hypervisor
	a.Must(t, "restore", "web", k.name, "--full", "--yes")
	a.isAt(t, "web", k.name, k.at)
	a.checkClock(t, "web")
	a.runs(t, "web", line)
	a.Must(t, "fork", k.name, "--name", "try")
	a.isAt(t, "try-1", k.name, k.at)
	a.runs(t, "try-1", line)
	a.Must(t, "rm", "try-1", "--force")
	a.Must(t, "checkpoint", "verify", k.name)
	a.Must(t, "run", "fresh", "--image", "debian", "--memory", "256M")
	a.Must(t, "exec", "fresh", "--", "true")
	a.runs(t, "fresh", line)
	a.Must(t, "rm", "fresh", "--force")
	next := a.checkpoint(t, "web", fmt.Sprintf("after-%s", k.name))
	if id := a.listed(t, k.name).ID; next.Checkpoint.Parent != id {
		t.Errorf("what is taken after a restore has the parent %s, not %s", next.Checkpoint.Parent, id)
	}
	a.awaitProgress(t, "web", k.at)
	a.clean(t)
}
