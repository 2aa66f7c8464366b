package session

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// Content is what a machine has, as digests or as it is.
type Content struct{ Memory, Disk string }

// Model drives machines through writes, checkpoints, restores, forks,
// suspensions and removals in any order, and knows at each step what every
// machine and every checkpoint has. Its life: its fields are set, Begin runs
// the first machine, Step does one thing and compares all that runs.
type Model struct {
	*Session
	T testing.TB
	// Run are the arguments of `run` besides the name.
	Run []string
	// Prepare makes the first machine ready for the rest; it may be nil.
	Prepare func(machine string)
	// Write changes memory and disk of a machine, differently for each seed;
	// the disk keeps it through a power cut.
	Write func(machine string, seed int)
	// Content reads all of it, in the guest.
	Content func(machine string) Content
	// Most machines at a time; 3 if 0.
	Most int

	fresh       Content // of a machine that was just made
	machines    map[string]*modeled
	checkpoints map[string]kept
	count       int
}

// modeled is one machine.
type modeled struct {
	Content
	// head is the checkpoint it is suspended at; empty while it runs.
	head string
}

// kept is one checkpoint.
type kept struct {
	Content
	full    bool
	machine string
}

// Begin runs the first machine.
func (m *Model) Begin() {
	m.T.Helper()
	if m.Most == 0 {
		m.Most = 3
	}
	m.machines, m.checkpoints = map[string]*modeled{}, map[string]kept{}
	m.Must(m.T, append([]string{"run", "first"}, m.Run...)...)
	if m.Prepare != nil {
		m.Prepare("first")
	}
	m.fresh = m.Content("first")
	m.machines["first"] = &modeled{Content: m.fresh}
}

// Step does one thing that r chooses.
func (m *Model) Step(r *rapid.T) {
	m.T.Helper()
	name := rapid.SampledFrom(slices.Sorted(maps.Keys(m.machines))).Draw(r, "machine")
	machine := m.machines[name]
	actions := []func(*rapid.T, string, *modeled){m.write, m.write, m.checkpointFull, m.checkpointFull, m.checkpointDisk, m.checkpointFrozen, m.suspend, m.remove}
	if machine.head != "" {
		actions = []func(*rapid.T, string, *modeled){m.resume}
	}
	if len(m.checkpoints) > 0 {
		actions = append(actions, m.restore, m.restore, m.fork, m.forget)
	}
	rapid.SampledFrom(actions).Draw(r, "action")(r, name, machine)
	for name, machine := range m.machines {
		if machine.head != "" {
			continue
		}
		if got := m.Content(name); got != machine.Content {
			m.T.Fatalf("machine %s has %+v, want %+v", name, got, machine.Content)
		}
	}
}

// do logs and runs a command line that has to succeed.
func (m *Model) do(v any, args ...string) {
	m.T.Helper()
	m.T.Logf("%v", args)
	m.JSON(m.T, v, args...)
}

func (m *Model) write(_ *rapid.T, name string, machine *modeled) {
	m.count++
	m.T.Logf("[write %s %d]", name, m.count)
	m.Write(name, m.count)
	before := machine.Content
	if machine.Content = m.Content(name); machine.Memory == before.Memory || machine.Disk == before.Disk {
		m.T.Fatalf("a write changed nothing: %+v, then %+v", before, machine.Content)
	}
}

// made is a checkpoint in JSON.
type made struct {
	Checkpoint struct{ ID, Kind string }
}

func (m *Model) checkpointFull(_ *rapid.T, name string, machine *modeled) {
	var v made
	m.do(&v, "checkpoint", "create", name)
	m.keep(v.Checkpoint.ID, v.Checkpoint.Kind, name, machine.Content)
}

func (m *Model) keep(id, kind, machine string, c Content) {
	if kind != "full" {
		c.Memory = m.fresh.Memory
	}
	m.checkpoints[id] = kept{c, kind == "full", machine}
}

// checkpointDisk boots the machine again.
func (m *Model) checkpointDisk(_ *rapid.T, name string, machine *modeled) {
	var v made
	m.do(&v, "checkpoint", "create", name, "--kind", "disk", "--mode", "stopped")
	m.keep(v.Checkpoint.ID, v.Checkpoint.Kind, name, machine.Content)
	machine.Memory = m.fresh.Memory
}

// checkpointFrozen is of a machine that goes on.
func (m *Model) checkpointFrozen(_ *rapid.T, name string, machine *modeled) {
	var v made
	m.do(&v, "checkpoint", "create", name, "--kind", "disk", "--mode", "frozen")
	m.keep(v.Checkpoint.ID, v.Checkpoint.Kind, name, machine.Content)
}

func (m *Model) suspend(_ *rapid.T, name string, machine *modeled) {
	var v made
	m.do(&v, "suspend", name)
	m.keep(v.Checkpoint.ID, v.Checkpoint.Kind, name, machine.Content)
	machine.head = v.Checkpoint.ID
}

func (m *Model) resume(_ *rapid.T, name string, machine *modeled) {
	var v struct{}
	m.do(&v, "resume", name)
	machine.head = ""
}

// one draws a checkpoint, of the machine unless that is empty.
func (m *Model) one(r *rapid.T, machine string) (string, bool) {
	ids := slices.Sorted(maps.Keys(m.checkpoints))
	ids = slices.DeleteFunc(ids, func(id string) bool { return machine != "" && m.checkpoints[id].machine != machine })
	if len(ids) == 0 {
		return "", false
	}
	return rapid.SampledFrom(ids).Draw(r, "checkpoint"), true
}

func (m *Model) restore(r *rapid.T, name string, machine *modeled) {
	id, ok := m.one(r, name)
	if !ok {
		return
	}
	c := m.checkpoints[id]
	args := []string{"restore", name, id, "--disk", "--yes"}
	if c.full && rapid.Bool().Draw(r, "full") {
		args[3] = "--full"
	} else {
		c.Memory = m.fresh.Memory
	}
	if rapid.Bool().Draw(r, "no safety") {
		args = append(args, "--no-safety")
	}
	var v struct{ Safety *struct{ ID, Kind string } }
	m.do(&v, args...)
	if v.Safety != nil {
		m.keep(v.Safety.ID, v.Safety.Kind, name, machine.Content)
	}
	machine.Content, machine.head = c.Content, ""
}

func (m *Model) fork(r *rapid.T, _ string, _ *modeled) {
	id, ok := m.one(r, "")
	if !ok || len(m.machines) >= m.Most {
		return
	}
	m.count++
	var v struct{ Machines []struct{ Name string } }
	m.do(&v, "fork", id, "--name", fmt.Sprintf("fork%d", m.count))
	m.machines[v.Machines[0].Name] = &modeled{Content: m.checkpoints[id].Content}
}

// forget is refused only while a machine is suspended there.
func (m *Model) forget(r *rapid.T, _ string, _ *modeled) {
	id, ok := m.one(r, "")
	if !ok {
		return
	}
	want := 0
	for _, machine := range m.machines {
		if machine.head == id {
			want = 7
		}
	}
	m.T.Logf("[checkpoint rm %s] to end with %d", id, want)
	got, err := m.Session.Run("checkpoint", "rm", id)
	if err != nil || got.Code != want {
		m.T.Fatalf("checkpoint rm %s ended with %d, %v: %s", id, got.Code, err, got.Stderr)
	}
	if want == 0 {
		delete(m.checkpoints, id)
	}
}

// remove takes the machine's checkpoints with it.
func (m *Model) remove(_ *rapid.T, name string, _ *modeled) {
	if len(m.machines) == 1 {
		return
	}
	m.T.Logf("[rm %s]", name)
	m.Must(m.T, "rm", name, "--force")
	delete(m.machines, name)
	maps.DeleteFunc(m.checkpoints, func(_ string, k kept) bool { return k.machine == name })
}
