package vm_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/test/session"
)

// program is where the acceptance program and its folder are in a guest.
const (
	program    = "/root/acceptance"
	programDir = "/root/alive"
)

// acceptanceDir is where the acceptance program is built; empty before.
var acceptanceDir string

func TestMain(m *testing.M) {
	code := m.Run()
	_ = os.RemoveAll(acceptanceDir)
	os.Exit(code)
}

// buildAcceptance builds the acceptance program once for all tests.
var buildAcceptance = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("/tmp", "hpacceptance")
	if err != nil {
		return "", err
	}
	acceptanceDir = dir
	path := filepath.Join(dir, "acceptance")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "../acceptance")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the acceptance program: %w: %s", err, out)
	}
	return path, nil
})

// alive is a session whose machines run the acceptance program.
type alive struct {
	*session.Session
}

// newAlive is for a test that ends it.
func newAlive(t *testing.T) alive {
	t.Helper()
	prepared(t)
	s, err := newSession()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			logOf(t, s)
		}
		if err := s.End(); err != nil {
			t.Error(err)
		}
	})
	return alive{s}
}

// logOf shows what the daemon said last.
func logOf(t *testing.T, s *session.Session) {
	text, err := os.ReadFile(filepath.Join(s.Home, "log", "daemon.log"))
	if err != nil {
		t.Log(err)
	}
	lines := strings.Split(string(text), "\n")
	t.Log(strings.Join(lines[max(0, len(lines)-40):], "\n"))
}

// start runs a new machine with the acceptance program in it.
func (a alive) start(t *testing.T, machine string, run ...string) {
	t.Helper()
	a.Must(t, append([]string{"run", machine, "--image", "debian", "--memory", "256M"}, run...)...)
	a.put(t, machine)
	a.Must(t, "exec", machine, "--detach", "--", program, "run", programDir)
	a.awaitProgram(t, machine)
}

func (a alive) put(t *testing.T, machine string) {
	t.Helper()
	path, err := buildAcceptance()
	if err != nil {
		t.Fatal(err)
	}
	a.Must(t, "cp", path, machine+":"+program)
}

// awaitProgram waits until the program can be asked.
func (a alive) awaitProgram(t testing.TB, machine string) {
	t.Helper()
	a.Must(t, "exec", machine, "--", "sh", "-c", "while ! test -S "+programDir+"/sock; do sleep 0.1; done")
}

// patience is for what includes a boot, on a host that is busy with others.
const patience = 2 * time.Minute

// await repeats check until it gives nil.
func await(t *testing.T, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond) // there is no event
	}
}

// report is what the program says of itself, as far as tests look into it.
type report struct {
	Records     uint64
	Passed      uint64
	Ticks       uint64
	Changes     uint64
	DirectReads uint64 `json:"direct_reads"`
	Mark        string
	Problems    []string

	text string
}

// ask gives the program's answer.
func (a alive) ask(t testing.TB, machine string, command ...string) string {
	t.Helper()
	args := append([]string{"exec", machine, "--", program, "ask", programDir}, command...)
	return strings.TrimSpace(a.Must(t, args...))
}

// check fails the test unless the program says that all is well and nothing
// went backwards since the earlier report.
func (a alive) check(t *testing.T, machine string, earlier report) report {
	t.Helper()
	command := []string{"report"}
	if earlier.text != "" {
		command = append(command, earlier.text)
	}
	r := report{text: a.ask(t, machine, command...)}
	if err := json.Unmarshal([]byte(r.text), &r); err != nil {
		t.Fatalf("%v: %s", err, r.text)
	}
	if len(r.Problems) > 0 {
		t.Fatalf("in %s: %s", machine, strings.Join(r.Problems, "; "))
	}
	return r
}

// awaitProgress waits until the program has done much more than in an earlier
// report, so that going back to that is seen.
func (a alive) awaitProgress(t *testing.T, machine string, since report) report {
	t.Helper()
	const much = 50
	var r report
	await(t, func() error {
		r = a.check(t, machine, since)
		if r.Records < since.Records+much || r.Passed < since.Passed+much || r.Changes < since.Changes+much ||
			r.DirectReads < since.DirectReads+much {
			return fmt.Errorf("the program does not get on: %s after %s", r.text, since.text)
		}
		return nil
	})
	return r
}

// mark leaves a text in the program's memory and on the disk.
func (a alive) mark(t *testing.T, machine, text string) {
	t.Helper()
	a.ask(t, machine, "mark", text)
	a.Must(t, "exec", machine, "--", "sh", "-c", "echo "+text+" >/mark; sync /mark")
}

// isAt fails the test unless all is well in the machine, nothing went back
// behind what was reported before the checkpoint, and memory and disk have the mark.
func (a alive) isAt(t *testing.T, machine, mark string, checkpoint report) report {
	t.Helper()
	r := a.check(t, machine, checkpoint)
	disk := strings.TrimSpace(a.Must(t, "exec", machine, "--", "cat", "/mark"))
	if r.Mark != mark || disk != mark {
		t.Fatalf("the memory of %s is at %q and its disk at %q, not at %q", machine, r.Mark, disk, mark)
	}
	return r
}

// created is what `checkpoint create` says.
type created struct {
	Checkpoint struct{ ID, Kind, Consistency, Parent string }
	DowntimeMS float64 `json:"downtime_ms"`
	DurableMS  float64 `json:"durable_ms"`
}

func (a alive) checkpoint(t *testing.T, machine, name string, more ...string) created {
	t.Helper()
	var c created
	a.JSON(t, &c, append([]string{"checkpoint", "create", machine, "--name", name}, more...)...)
	return c
}

// clean is Session.Clean.
func (a alive) clean(t *testing.T) {
	t.Helper()
	if err := a.Clean(); err != nil {
		t.Fatal(err)
	}
}

func decode(t *testing.T, text string, v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), v); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
}
