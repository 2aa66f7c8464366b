package script_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/test/session"
)

// faulted is a machine of which each verb is stopped at each of its steps.
type faulted struct {
	*session.Session
	t     *testing.T
	verb  faultedVerb
	count int
}

// faultedVerb is a verb that has an effect.
type faultedVerb struct {
	args []string
	// before makes what it needs.
	before [][]string
	// after are the contents that the machine's memory and disk may have then: new,
	// what was written before the verb, base, or fresh, a disk that was booted from.
	after []string
}

// TestFaultAtEveryStep ends the daemon, or the monitor, before each step by which a
// verb changes our state on disk, makes that step fail, or finds no room for it and
// all later ones. The steps are those that the verb was seen to make, so that a new
// one is tried, too. Whatever becomes of the verb, the machine then is what it was
// before or after it, each checkpoint that is listed can be restored, and nothing
// half-made is left.
func TestFaultAtEveryStep(t *testing.T) {
	if os.Getenv(manyVariable) == "" {
		t.Skip("it takes an hour; run make test-faults")
	}
	for name, verb := range map[string]faultedVerb{
		"create-full":    {args: []string{"checkpoint", "create", "web", "--name", "made"}, after: []string{"new"}},
		"create-frozen":  {args: []string{"checkpoint", "create", "web", "--kind", "disk", "--name", "made"}, after: []string{"new"}},
		"create-stopped": {args: []string{"checkpoint", "create", "web", "--kind", "disk", "--mode", "stopped", "--name", "made"}, after: []string{"new", "disk"}},
		"restore-full":   {args: []string{"restore", "web", "base", "--full", "--yes"}, after: []string{"new", "base"}},
		"restore-disk":   {args: []string{"restore", "web", "base", "--disk", "--yes"}, after: []string{"new", "basedisk"}},
		"suspend":        {args: []string{"suspend", "web"}, after: []string{"new"}},
		"resume":         {before: [][]string{{"suspend", "web"}}, args: []string{"resume", "web"}, after: []string{"new"}},
		"fork":           {args: []string{"fork", "base", "--count", "2", "--name", "child"}, after: []string{"new"}},
		"fork-running":   {args: []string{"fork", "--machine", "web", "--name", "child"}, after: []string{"new"}},
		"forget":         {before: [][]string{{"checkpoint", "create", "web", "--name", "made"}}, args: []string{"checkpoint", "rm", "made"}, after: []string{"new"}},
		"stop":           {args: []string{"stop", "web"}, after: []string{"new", "disk"}},
		"start":          {before: [][]string{{"stop", "web"}}, args: []string{"start", "web"}, after: []string{"disk"}},
		"pause":          {args: []string{"pause", "web"}, after: []string{"new"}},
		"run":            {args: []string{"run", "child-1", "--image", "debian"}, after: []string{"new"}},
		"rm":             {before: [][]string{{"fork", "base", "--name", "child"}}, args: []string{"rm", "child-1", "--force"}, after: []string{"new"}},
		"rename":         {before: [][]string{{"fork", "base", "--name", "kid"}}, args: []string{"rename", "kid-1", "child-1"}, after: []string{"new"}},
		"expose":         {args: []string{"expose", "web", "8080"}, after: []string{"new"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSession(t)
			folder := filepath.Join(s.Dir, "faults")
			if err := os.Mkdir(folder, 0o700); err != nil {
				t.Fatal(err)
			}
			s.Env = append(s.Env, faultsVariable+"="+folder, "HOLDPOINT_VERIFY=off", "HOLDPOINT_FIRST_BOOTS=off")
			f := &faulted{Session: s, t: t, verb: verb}
			s.Must(t, "run", "web", "--image", "debian")
			f.write("base")
			s.Must(t, "checkpoint", "create", "web", "--name", "base")
			for _, kind := range []string{"daemon", "monitor"} {
				steps := f.steps(kind)
				for _, o := range orders(kind, len(steps)) {
					f.stop(o, steps[o.n-1])
				}
			}
		})
	}
}

// steps does the verb undisturbed and gives its steps in processes of the kind.
func (f *faulted) steps(kind string) (steps []string) {
	f.t.Helper()
	f.begin()
	if err := order(f.folder(), stepOrder{kind, 0, "none"}); err != nil {
		f.t.Fatal(err)
	}
	f.Must(f.t, f.verb.args...)
	trace, err := os.ReadFile(filepath.Join(f.folder(), stepsTrace))
	if err != nil && !os.IsNotExist(err) {
		f.t.Fatal(err)
	}
	for line := range strings.Lines(string(trace)) {
		steps = append(steps, strings.TrimSpace(line))
	}
	f.end(kind+", undisturbed", "none")
	f.t.Logf("%d steps of the %s", len(steps), kind)
	return steps
}

func (f *faulted) folder() string { return filepath.Join(f.Dir, "faults") }

// orders are all that is to happen at n steps.
func orders(kind string, n int) (all []stepOrder) {
	for step := 1; step <= n; step++ {
		for _, action := range []string{"kill", "error", "full"} {
			all = append(all, stepOrder{kind, step, action})
		}
	}
	return all
}

// begin writes something new, and does what the verb needs.
func (f *faulted) begin() {
	f.t.Helper()
	f.count++
	f.write(fmt.Sprintf("new%d", f.count))
	for _, args := range f.verb.before {
		f.Must(f.t, args...)
	}
}

func (f *faulted) write(content string) {
	f.t.Helper()
	f.Must(f.t, "exec", "web", "--", "sh", "-c", "echo "+content+" >run/mem; echo "+content+" >file; sync file")
}

// stop does the verb with a fault.
func (f *faulted) stop(o stepOrder, step string) {
	f.t.Helper()
	what := fmt.Sprintf("%s at %s", o.action, step)
	f.begin()
	if err := order(f.folder(), o); err != nil {
		f.t.Fatal(err)
	}
	r, err := f.Run(f.verb.args...)
	if err := disarm(f.folder()); err != nil {
		f.t.Fatal(err)
	}
	f.t.Logf("%s: ended with %d: %s", what, r.Code, strings.TrimSpace(r.Stderr))
	if err != nil || strings.Count(strings.TrimSpace(r.Stderr), "\n") > 3 {
		f.t.Fatalf("%s: %v, it said %q", what, err, r.Stderr)
	}
	f.end(what, o.action)
}

// end checks all that has to hold, and brings the machine back to where the next one
// begins. What could not be removed because of a fault, the next daemon removes; the
// machine does not wait for that.
func (f *faulted) end(what, action string) {
	f.t.Helper()
	f.Must(f.t, "ls")
	f.restart(what)
	f.check(what)
	if action == "error" || action == "full" {
		f.Must(f.t, "daemon", "stop")
		f.Must(f.t, "ls")
	}
	if err := f.Clean(); err != nil {
		f.t.Fatalf("%s: %v", what, err)
	}
	var list struct {
		Checkpoints []struct{ ID, Name, Kind string }
	}
	f.JSON(f.t, &list, "checkpoint", "ls")
	for _, k := range list.Checkpoints {
		if k.Name != "base" {
			f.Must(f.t, "checkpoint", "verify", k.ID)
			f.Must(f.t, "checkpoint", "rm", k.ID)
		}
	}
	var machines struct{ Machines []struct{ Name string } }
	f.JSON(f.t, &machines, "ls")
	for _, m := range machines.Machines {
		if m.Name != "web" {
			f.Must(f.t, "rm", m.Name, "--force")
		}
	}
	_, _ = f.Run("unexpose", "web.localhost") // where there is one
	if err := f.Clean(); err != nil {
		f.t.Fatalf("%s, and removing what it has left: %v", what, err)
	}
}

// restart makes the machine run, whatever it does.
func (f *faulted) restart(what string) {
	f.t.Helper()
	var v struct{ Machine struct{ State string } }
	err := session.Await(func() error { // what is unfinished is finished by itself
		f.JSON(f.t, &v, "inspect", "web")
		verb := map[string]string{"paused": "resume", "suspended": "resume", "stopped": "start"}[v.Machine.State]
		switch {
		case v.Machine.State == "running":
			return nil
		case verb == "":
			return fmt.Errorf("the machine is %s", v.Machine.State)
		}
		r, err := f.Run(verb, "web")
		if err == nil && r.Code != 0 {
			err = fmt.Errorf("%s: %s", verb, r.Stderr)
		}
		return err
	})
	if err != nil {
		f.t.Fatalf("%s: %v", what, err)
	}
}

// check compares the machine's memory and disk with what they may be.
func (f *faulted) check(what string) {
	f.t.Helper()
	var got string
	err := session.Await(func() error { // its monitor may just have died
		r, err := f.Run("exec", "web", "--", "sh", "-c", "cat run/mem 2>/dev/null || echo none; cat file")
		if got = r.Stdout; err == nil && r.Code != 0 {
			err = fmt.Errorf("the machine does not answer: %s", r.Stderr)
		}
		return err
	})
	if err != nil {
		f.t.Fatalf("%s: %v", what, err)
	}
	written := fmt.Sprintf("new%d", f.count)
	may := map[string]string{
		"new": written + "\n" + written + "\n", "disk": "none\n" + written + "\n",
		"base": "base\nbase\n", "basedisk": "none\nbase\n",
	}
	if !slices.ContainsFunc(f.verb.after, func(c string) bool { return got == may[c] }) {
		f.t.Fatalf("%s: the machine has %q, %s may have been the last", what, got, written)
	}
}
