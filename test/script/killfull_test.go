package script_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/test/session"
)

// cutStory is a machine whose whole-machine verbs are cut off again and again.
type cutStory struct {
	*session.Session
	t      *testing.T
	random *rand.Rand
	// spans is how long each verb takes when it is let alone.
	spans map[string]time.Duration
	cuts  int
	// said is what the last command line said.
	said string
}

// TestWholeMachinesKilledAtRandomMoments kills the daemon, the monitors and
// both in the middle of every verb on whole machines. Whatever became of the
// verb, the machine then goes on with its memory and disk of before or after
// it, and nothing half-made is left.
func TestWholeMachinesKilledAtRandomMoments(t *testing.T) {
	t.Parallel()
	s := newSession(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	k := &cutStory{Session: s, t: t, random: rand.New(rand.NewPCG(seed, 0)), spans: map[string]time.Duration{}}
	s.Must(t, "run", "web", "--image", "debian")
	k.write("base")
	s.Must(t, "checkpoint", "create", "web", "--name", "base")
	rounds := 4
	if testing.Short() {
		rounds = 2
	}
	for round := range rounds {
		for _, victim := range []session.Victim{session.Daemon, session.Monitor, session.Both} {
			k.round(fmt.Sprintf("%d%c", round, victim[0]), victim)
		}
	}
	if k.cuts == 0 {
		t.Error("no verb was cut off")
	}
}

func (k *cutStory) write(content string) {
	k.Must(k.t, "exec", "web", "--", "sh", "-c", "echo "+content+" >run/mem; echo "+content+" >file; sync file")
}

// expect holds that a machine has the content in memory and on its disk.
func (k *cutStory) expect(machine, content, after string) {
	k.t.Helper()
	// Its monitor may just have died.
	err := session.Await(func() error {
		r, err := k.Run("exec", machine, "--", "true")
		if err == nil && r.Code != 0 {
			err = fmt.Errorf("machine %s does not answer: %s", machine, r.Stderr)
		}
		return err
	})
	if err != nil {
		k.t.Fatalf("%s: %v", after, err)
	}
	got := k.Must(k.t, "exec", machine, "--", "cat", "run/mem", "file")
	if want := content + "\n" + content + "\n"; got != want {
		k.t.Fatalf("%s: %s has %q, want %q", after, machine, got, want)
	}
}

// cut kills the victim in the middle of a command line, waits until all is
// settled, and reports whether the command line succeeded.
func (k *cutStory) cut(name string, victim session.Victim, args ...string) bool {
	k.t.Helper()
	verb := strings.Join(args[:min(2, len(args))], " ")
	if k.spans[verb] == 0 {
		k.spans[verb] = time.Second
	}
	moment := time.Duration(k.random.Float64() * float64(k.spans[verb]))
	cmd := k.Command(args...)
	began := time.Now()
	done := make(chan error, 1)
	go func() {
		out, err := cmd.CombinedOutput()
		k.said = string(out)
		done <- err
	}()
	time.Sleep(moment) // the one thing there is no event for
	if err := k.Kill(victim); err != nil {
		k.t.Fatal(err)
	}
	err := <-done
	if took := time.Since(began); err == nil && took < moment {
		k.spans[verb] = took
	} else if err != nil {
		k.cuts++
	}
	k.t.Logf("%s: %s killed after %v of %s: %v", name, victim, moment.Round(time.Millisecond), verb, err)
	k.Must(k.t, "ls")
	if err := k.Clean(); err != nil {
		k.t.Fatalf("%s: after %s: %v", name, verb, err)
	}
	return err == nil
}

// machine is what the machine's state and generation are.
func (k *cutStory) machine(name string) (state string, generation uint64) {
	var v struct {
		Machine struct {
			State      string `json:"state"`
			Generation uint64 `json:"generation"`
		}
	}
	k.JSON(k.t, &v, "inspect", name)
	return v.Machine.State, v.Machine.Generation
}

func (k *cutStory) round(name string, victim session.Victim) {
	k.write(name)
	said := k.cut(name, victim, "checkpoint", "create", "web", "--name", "c"+name)
	k.expect("web", name, "checkpoint")
	if r, err := k.Run("checkpoint", "show", "c"+name); err != nil || said && r.Code != 0 {
		k.t.Fatalf("%s: the checkpoint was reported and is not there: %v %s", name, err, r.Stderr)
	} else if r.Code == 0 {
		k.write("later")
		k.Must(k.t, "restore", "web", "c"+name, "--full", "--yes", "--no-safety")
		k.expect("web", name, "restore of a checkpoint that was cut off")
	}

	said = k.cut(name, victim, "checkpoint", "create", "web", "--kind", "disk", "--name", "d"+name)
	k.expect("web", name, "frozen checkpoint")
	if r, err := k.Run("checkpoint", "show", "d"+name); err != nil || said && r.Code != 0 {
		k.t.Fatalf("%s: the frozen checkpoint was reported and is not there: %v %s", name, err, r.Stderr)
	} else if r.Code == 0 {
		k.Must(k.t, "fork", "d"+name, "--name", "d"+name)
		if got := k.Must(k.t, "exec", "d"+name+"-1", "--", "cat", "file"); got != name+"\n" {
			k.t.Fatalf("%s: a fork of a frozen checkpoint that was cut off has %q", name, got)
		}
		k.Must(k.t, "rm", "d"+name+"-1", "--force")
	}

	_, before := k.machine("web")
	said = k.cut(name, victim, "restore", "web", "base", "--full", "--yes")
	state, after := k.machine("web")
	if state != "running" || said && after == before {
		k.t.Fatalf("%s: after a restore the machine is %s, generation %d became %d, said done: %v", name, state, before, after, said)
	}
	want := name
	if after > before {
		want = "base"
	}
	k.expect("web", want, "restore")

	for _, step := range [][2]string{{"pause", "paused"}, {"resume", "running"}} {
		verb, want := step[0], step[1]
		if state, _ := k.machine("web"); state == want {
			continue
		}
		said := k.cut(name, victim, verb, "web")
		if state, _ := k.machine("web"); said && state != want || state == want && strings.Contains(k.said, "nothing was done") {
			k.t.Fatalf("%s: after %s the machine is %s, and it was said: %s", name, verb, state, k.said)
		}
	}
	if state, _ := k.machine("web"); state == "paused" {
		k.Must(k.t, "resume", "web")
	}

	k.cut(name, victim, "suspend", "web")
	if state, _ := k.machine("web"); state == "suspended" {
		k.cut(name, victim, "resume", "web")
	}
	if state, _ := k.machine("web"); state == "suspended" {
		k.Must(k.t, "resume", "web")
	}
	k.expect("web", want, "suspend and resume")

	k.cut(name, victim, "fork", "base", "--count", "2", "--name", "f"+name)
	for i := 1; i <= 2; i++ {
		child := fmt.Sprintf("f%s-%d", name, i)
		if r, err := k.Run("inspect", child); err == nil && r.Code == 0 {
			k.expect(child, "base", "fork")
			k.Must(k.t, "rm", child, "--force")
		}
	}

	k.cut(name, victim, "checkpoint", "pool", "base", "1")
	k.Must(k.t, "checkpoint", "pool", "base", "0")
	if err := k.Clean(); err != nil {
		k.t.Fatalf("%s: after a pool: %v", name, err)
	}
}
