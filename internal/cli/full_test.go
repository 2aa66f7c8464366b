package cli_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// A checkpoint that failed its verification is told of wherever it is shown or
// asked for, and a verified one is not.
func TestFailedIsLoud(t *testing.T) {
	f, dir := serve(t, func(f *fake) {
		f.full = true
		f.plan = &holdpointv1.RestorePlan{Machine: "web", Checkpoint: fullCheckpoint(5)}
	})
	const warning = "warning: checkpoint broken of web FAILED verification and may not be restorable: layer m2: digest differs; make another one\n"
	for _, args := range []string{"checkpoint ls", "checkpoint show broken", "checkpoint ls --json", "restore web broken --full --yes"} {
		if r := holdpoint(dir, "", split(args)...); r.code != 0 || strings.Count(r.stderr, warning) != 1 || strings.Contains(r.stderr, "green") {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if r := holdpoint(dir, "", "restore", "web", "broken", "--full", "--plan"); !strings.Contains(r.stdout, "Warning: checkpoint broken of web FAILED") {
		t.Errorf("restore --plan: %+v", r)
	}
	if r := holdpoint(dir, "", "log"); !strings.Contains(r.stdout, "FAILED verification: layer m2: digest differs") {
		t.Errorf("log: %+v", r)
	}
	f.full = false
	if r := holdpoint(dir, "", "checkpoint", "ls"); r.stderr != "" {
		t.Errorf("checkpoint ls without full ones: %+v", r)
	}
}

// The output of every machine comes in whole lines, with its name.
func TestForkOutput(t *testing.T) {
	_, dir := serve(t)
	r := holdpoint(dir, "", split("fork green --count 10 --name try -- index")...)
	if r.code != 0 {
		t.Fatalf("%+v", r)
	}
	lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n")
	var of3 []string
	for _, line := range lines {
		if strings.HasPrefix(line, "try-3 ") {
			of3 = append(of3, line)
		}
	}
	if want := []string{"try-3  | one FORK_INDEX=3", "try-3  | \x1b[31mtwo"}; !slices.Equal(of3, want) || len(lines) != 20 {
		t.Errorf("%d lines, of try-3 %q", len(lines), of3)
	}
	if strings.Count(r.stderr, "| said\n") != 10 {
		t.Errorf("stderr %q", r.stderr)
	}
	if r := holdpoint(dir, "", split("fork green -- echo x")...); r.stdout != "try-1 | x\n" || r.stderr != "try-1 | said\n" {
		t.Errorf("one machine: %+v", r)
	}
}

// The exit code is that of the first machine, by number, that has one; our own
// failure is 125 where there is a command.
func TestForkCodes(t *testing.T) {
	taken := &holdpointv1.ForkResult{Name: "try-2", Index: 2, Error: &holdpointv1.ErrorInfo{Kind: "ALREADY_EXISTS", Message: "fork: a machine try-2 exists"}}
	for _, test := range []struct {
		args  string
		forks []*holdpointv1.ForkResult
		code  int
		says  string
	}{
		{"fork green --count 3", nil, 0, ""},
		{"fork green --count 3 -- odd", nil, 7, "holdpoint: try-2: exit code 7\n"},
		{"fork green --count 2 -- missing", nil, 127, "holdpoint: try-1: missing: not found\n"},
		{"fork green -- busy", nil, 125, "holdpoint: try-1: exec in web: the machine is stopped"},
		{"fork green", []*holdpointv1.ForkResult{forked(1), taken}, 4, "holdpoint: try-2: fork: a machine try-2 exists\n"},
		{"fork green -- odd", []*holdpointv1.ForkResult{forked(1), taken, forked(3)}, 125, "holdpoint: try-2: fork: a machine try-2 exists\n"},
		{"fork green -- fail 9", []*holdpointv1.ForkResult{forked(1), taken}, 9, "holdpoint: try-2: fork: a machine try-2 exists\n"},
		{"fork green -- odd", []*holdpointv1.ForkResult{taken}, 125, "holdpoint: try-2: fork: a machine try-2 exists\n"},
		{"fork", nil, 2, "of what?"},
		{"fork green --count 0", nil, 2, "makes nothing"},
		{"fork green --", nil, 125, "is missing"},
		{"fork green ./run --fast", nil, 2, "flag"},
		{"fork green ./run", nil, 2, "`holdpoint fork green -- ./run`"},
		{"fork green --no-such -- x", nil, 125, "no-such"},
		{"fork web", nil, 3, "`holdpoint fork --machine web`"},
		{"fork web -- x", nil, 125, "`holdpoint fork --machine web`"},
	} {
		t.Run(test.args, func(t *testing.T) {
			_, dir := serve(t, func(f *fake) { f.forks = test.forks })
			r := holdpoint(dir, "", split(test.args)...)
			if r.code != test.code || !strings.Contains(r.stderr, test.says) || test.says == "" && r.stderr != "" {
				t.Errorf("%+v", r)
			}
		})
	}
}

// A fork that fails as a whole is told as by any verb, and with a command is
// our own failure.
func TestForkFails(t *testing.T) {
	f, dir := serve(t)
	f.fail = errdefs.New(errdefs.NoSpace, "fork: no room")
	if got, want := holdpoint(dir, "", "fork", "green"), (run{9, "", "holdpoint: fork: no room\n"}); got != want {
		t.Errorf("%+v", got)
	}
	if got, want := holdpoint(dir, "", "fork", "green", "--", "echo", "x"), (run{125, "", "holdpoint: fork: no room\n"}); got != want {
		t.Errorf("with a command: %+v", got)
	}
}

// What --json keeps of an output is bounded, and says so.
func TestForkKeepsABoundedOutput(t *testing.T) {
	_, dir := serve(t)
	var got struct {
		Machines []struct {
			Stdout    string
			Truncated bool
			ExitCode  *int `json:"exit_code"`
		}
	}
	r := holdpoint(dir, "", split("fork green --count 2 --json -- lots")...)
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || r.code != 0 || len(got.Machines) != 2 {
		t.Fatalf("%v, code %d, stderr %q", err, r.code, r.stderr)
	}
	for _, m := range got.Machines {
		if len(m.Stdout) != 1<<20 || !m.Truncated || m.ExitCode == nil || *m.ExitCode != 0 {
			t.Errorf("%d bytes, truncated %v, exit code %v", len(m.Stdout), m.Truncated, m.ExitCode)
		}
	}
}
