package session

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// Result is what one command line said.
type Result struct {
	Stdout, Stderr string
	Code           int
}

// Command prepares a command line of the session's holdpoint.
func (s *Session) Command(args ...string) *exec.Cmd {
	cmd := exec.Command(s.Binary, args...)
	cmd.Env = append(cmd.Environ(), s.Env...)
	cmd.Dir = s.Dir
	return cmd
}

// program is the path of the program that a script calls name.
func (s *Session) program(name string) string {
	if name == "holdpoint" && s.Binary != "" {
		return s.Binary
	}
	return name
}

// Run runs a command line of the session's holdpoint.
func (s *Session) Run(args ...string) (Result, error) {
	return finish(s.Command(args...))
}

func finish(cmd *exec.Cmd) (Result, error) {
	var out, diag bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &diag
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = nil
	}
	r := Result{Stdout: out.String(), Stderr: diag.String()}
	if cmd.ProcessState != nil {
		r.Code = cmd.ProcessState.ExitCode()
	}
	return r, err
}

// Must runs a command line that has to succeed and returns its stdout.
func (s *Session) Must(t testing.TB, args ...string) string {
	t.Helper()
	r, err := s.Run(args...)
	if err != nil || r.Code != 0 {
		t.Fatalf("holdpoint %s: exit code %d, %v\n%s%s", strings.Join(args, " "), r.Code, err, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// JSON runs a command line that has to succeed, with --json, into v.
func (s *Session) JSON(t testing.TB, v any, args ...string) {
	t.Helper()
	out := s.Must(t, append(args, "--json")...)
	if err := json.Unmarshal([]byte(out), v); err != nil {
		t.Fatalf("holdpoint %s: %v in %s", strings.Join(args, " "), err, out)
	}
}

// Victim says which processes are killed.
type Victim string

// The victims.
const (
	Daemon  Victim = "daemon"
	Monitor Victim = "monitor"
	Both    Victim = "daemon and monitor"
)

// Kill kills all the session's processes of the kind.
func (s *Session) Kill(v Victim) error {
	procs, err := s.Processes()
	if err != nil {
		return err
	}
	for _, p := range procs {
		if p.IsDaemon() && v != Monitor || p.IsMonitor() && v != Daemon {
			if err := KillAndWait(p.PID); err != nil {
				return err
			}
		}
	}
	return nil
}

// Story is one machine whose verbs are cut off again and again.
type Story struct {
	*Session
	// Machine is running.
	Machine string
	// Rounds is how often.
	Rounds int
	// Victims are killed in turn.
	Victims []Victim
	Random  *rand.Rand

	// outcomes counts the rounds by victim and by what became of the verb.
	outcomes map[string]int
	// span is how long the verb takes when it is let alone.
	span time.Duration
	// moments are when each round's victim is killed, as parts of span.
	moments []float64
}

// plan spreads the moments: of each victim's n, one at random is in each n-th
// part of the span, in random order.
func (k *Story) plan() {
	k.moments, k.outcomes = make([]float64, k.Rounds), map[string]int{}
	for v := range k.Victims {
		var rounds []int
		for round := v; round < k.Rounds; round += len(k.Victims) {
			rounds = append(rounds, round)
		}
		for i, part := range k.Random.Perm(len(rounds)) {
			k.moments[rounds[i]] = (float64(part) + k.Random.Float64()) / float64(len(rounds))
		}
	}
}

// state is what a round knows of the machine.
type state struct {
	State      string `json:"state"`
	Generation uint64 `json:"generation"`
}

// content is what the machine's disk says: one file, written and synced.
func (k *Story) content(t testing.TB) string {
	t.Helper()
	return strings.TrimSpace(k.Must(t, "exec", k.Machine, "--", "cat", "content"))
}

func (k *Story) write(t testing.TB, content string) {
	t.Helper()
	k.Must(t, "exec", k.Machine, "--", "sh", "-c", "echo "+content+" >content; sync content")
}

func (k *Story) state(t testing.TB) state {
	t.Helper()
	var v struct{ Machine state }
	k.JSON(t, &v, "inspect", k.Machine)
	return v.Machine
}

// end is how a command line ended, and how long it took.
type end struct {
	Result
	took time.Duration
	err  error
}

// cutOff begins a command line, kills the victim a part of the span later, and
// returns how the command line ended.
func (k *Story) cutOff(t testing.TB, round int, args []string) end {
	t.Helper()
	victim := k.Victims[round%len(k.Victims)]
	moment := time.Duration(k.moments[round] * float64(k.span))
	cmd := k.Command(args...)
	begun := time.Now()
	done := make(chan end, 1)
	go func() {
		r, err := finish(cmd)
		done <- end{r, time.Since(begun), err}
	}()
	time.Sleep(moment) // the one thing there is no event for
	if err := k.Kill(victim); err != nil {
		t.Fatal(err)
	}
	e := <-done
	if e.err != nil {
		t.Fatal(e.err)
	}
	outcome := "done all the same"
	switch {
	case e.Code != 0:
		outcome = "cut off"
	case e.took < moment: // faster than when it was measured
		outcome = "over by then"
		k.span = e.took
	}
	k.outcomes[string(victim)+" killed, "+outcome]++
	t.Logf("round %d: %s killed after %v of %s: %s, exit code %d %s", round, victim, moment.Round(time.Millisecond), args[0], outcome,
		e.Code, strings.ReplaceAll(strings.TrimSpace(e.Stderr), "\n", "; "))
	if victim == Daemon && e.Code != 0 && e.Code != interrupted {
		t.Errorf("round %d: exit code %d of a verb whose daemon was killed: %s", round, e.Code, e.Stderr)
	}
	return e
}

// interrupted is the exit code of a verb that was cut off.
const interrupted = 130

// cut cuts a command line off, and returns when the machine answers again and
// nothing half-made is left. It tells whether the command line succeeded.
func (k *Story) cut(t testing.TB, round int, args ...string) bool {
	t.Helper()
	e := k.cutOff(t, round, args)
	k.Must(t, "ls")
	err := Await(func() error {
		r, err := k.Run("exec", k.Machine, "--", "true")
		if err == nil && r.Code != 0 {
			err = fmt.Errorf("the machine does not answer: %s", r.Stderr)
		}
		return err
	})
	if err := errors.Join(err, k.Clean()); err != nil {
		t.Fatalf("after round %d: %v", round, err)
	}
	if got := k.state(t); got.State != "running" {
		t.Fatalf("after round %d the machine is %s", round, got.State)
	}
	return e.Code == 0
}

// CutCheckpoints cuts off `checkpoint create` of that mode. Afterwards the machine has its
// newest content, each checkpoint that was said to be there is, and the last
// ones that are, verify of them, hold what the disk was when they were taken.
func (k *Story) CutCheckpoints(t testing.TB, mode string, verify int) {
	t.Helper()
	create := func(name string) []string {
		return []string{"checkpoint", "create", k.Machine, "--kind", "disk", "--mode", mode, "--name", name}
	}
	k.write(t, "c")
	begun := time.Now()
	k.Must(t, create("c")...)
	k.span = time.Since(begun)
	k.plan()
	promised := map[string]bool{"c": true}
	for round := range k.Rounds {
		name := fmt.Sprintf("c%d", round)
		k.write(t, name)
		promised[name] = k.cut(t, round, create(name)...)
		if got := k.content(t); got != name {
			t.Fatalf("after round %d the machine has %q, want %q", round, got, name)
		}
	}
	var list struct{ Checkpoints []struct{ Name string } }
	k.JSON(t, &list, "checkpoint", "ls", k.Machine)
	there := map[string]bool{}
	for i, c := range list.Checkpoints {
		there[c.Name] = true
		if i < verify {
			k.Must(t, "restore", k.Machine, c.Name, "--disk", "--yes", "--no-safety")
			if got := k.content(t); got != c.Name {
				t.Errorf("checkpoint %s has %q", c.Name, got)
			}
		}
	}
	for name, was := range promised {
		if was && !there[name] {
			t.Errorf("checkpoint %s was reported and is not there", name)
		}
	}
	t.Logf("%d of %d checkpoints were made; %v", len(list.Checkpoints), k.Rounds+1, k.outcomes)
}

// CutRestores cuts off `restore`. Afterwards the machine has either what it had
// or what the checkpoint has, and its generation says which.
func (k *Story) CutRestores(t testing.TB) {
	t.Helper()
	k.write(t, "target")
	k.Must(t, "checkpoint", "create", k.Machine, "--kind", "disk", "--mode", "stopped", "--name", "target")
	restore := []string{"restore", k.Machine, "target", "--disk", "--yes"}
	begun := time.Now()
	k.Must(t, restore...)
	k.span = time.Since(begun)
	k.plan()
	restored := 0
	for round := range k.Rounds {
		content := fmt.Sprintf("r%d", round)
		k.write(t, content)
		before := k.state(t).Generation
		said := k.cut(t, round, restore...)
		after := k.state(t).Generation
		want := content
		if after > before {
			want = "target"
			restored++
		}
		if got := k.content(t); got != want || said && after == before {
			t.Fatalf("round %d: generation %d became %d, said done: %v, the machine has %q, want %q", round, before, after, said, got, want)
		}
	}
	t.Logf("%d of %d restores were done; %v", restored, k.Rounds, k.outcomes)
}
