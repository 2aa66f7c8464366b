package cli_test

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/cli/launch"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// TestOutput runs command lines against the fake and compares all they print,
// and their exit codes, with golden files: one for each group of verbs. A line
// that begins with $ is a command line; -update writes the files anew.
func TestOutput(t *testing.T) {
	f, dir := serve(t)
	f.ops["op-done"] = f.end(machineOperation())
	files, err := filepath.Glob("testdata/*.golden")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			f.full = filepath.Base(file) == "full.golden"
			var got strings.Builder
			for line := range strings.Lines(string(want)) {
				command, ok := strings.CutPrefix(line, "$ holdpoint ")
				if !ok {
					continue
				}
				r := holdpoint(dir, "", split(strings.TrimSpace(command))...)
				got.WriteString(line + transcript(r, dir))
			}
			if *update {
				if err := os.WriteFile(file, []byte(got.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if diff := cmp.Diff(string(want), got.String()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

var update = flag.Bool("update", false, "write golden files anew")

func transcript(r run, dir string) string {
	text := r.stdout
	if r.stderr != "" {
		text += "[stderr]\n" + r.stderr
	}
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	text += "[exit " + strconv.Itoa(r.code) + "]\n\n"
	text = strings.NewReplacer(dir, "HOME", launch.Build("test"), "BUILD").Replace(text)
	// Stamps follow the clock; ages do not, as the fake sets them back.
	return regexp.MustCompile(`\d{4}-\d\d-\d\dT[\d:.]+Z`).ReplaceAllString(text, "TIME")
}

// split splits a line into words at spaces outside of single quotes.
func split(line string) []string {
	var words []string
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			words = append(words, part)
		} else {
			words = append(words, strings.Fields(part)...)
		}
	}
	return words
}

// A list of operations has no errors, which are long; show has them.
func TestOperationsThatFailed(t *testing.T) {
	f, dir := serve(t)
	for id, state := range map[string]holdpointv1.OperationState{
		"op-f": holdpointv1.OperationState_OPERATION_STATE_FAILED, "op-c": holdpointv1.OperationState_OPERATION_STATE_CANCELED,
	} {
		op := machineOperation()
		op.Id, op.State, op.Phase, op.EndedAt = id, state, "boot", ago(0)
		op.Error = wire.Info(errdefs.New(errdefs.NoSpace, "start: a long story"))
		f.ops[id] = op
	}
	list := holdpoint(dir, "", "operation", "ls", "-a").stdout
	if strings.Contains(list, "story") || !regexp.MustCompile(`failed +1 min ago +boot, NO_SPACE\n`).MatchString(list) || !regexp.MustCompile(`canceled +1 min ago +boot\n`).MatchString(list) {
		t.Error(list)
	}
	if shown := holdpoint(dir, "", "operation", "show", "op-f").stdout; !strings.Contains(shown, "NO_SPACE: start: a long story") {
		t.Error(shown)
	}
}

// Every kind an operation ends with, and every one it is refused with, has its
// exit code, one line on stderr, and an object with --json.
func TestExitCodes(t *testing.T) {
	codes := map[errdefs.Kind]int{
		errdefs.Internal: 1, errdefs.Kind("NEW_KIND"): 1, errdefs.Invalid: 2, errdefs.NotFound: 3,
		errdefs.AlreadyExists: 4, errdefs.Conflict: 4, errdefs.RequestIDConflict: 4,
		errdefs.MachineBusy: 5, errdefs.WrongState: 5,
		errdefs.Unsupported: 6, errdefs.KindMismatch: 6, errdefs.Incompatible: 6,
		errdefs.Referenced: 7, errdefs.OutcomeUnknown: 8, errdefs.NoSpace: 9, errdefs.Storage: 9,
		errdefs.Deadline: 10, errdefs.Denied: 11, errdefs.Interrupted: 130,
	}
	f, dir := serve(t)
	for kind, code := range codes {
		failure := errdefs.New(kind, "start web:\nit is %s", kind)
		want := run{code, "", "holdpoint: start web: it is " + string(kind) + "\n"}
		f.fail, f.refuse = failure, nil
		if got := holdpoint(dir, "", "start", "web"); got != want {
			t.Errorf("an operation that fails with %s: %+v", kind, got)
		}
		f.fail, f.refuse = nil, failure
		if got := holdpoint(dir, "", "start", "web"); got != want {
			t.Errorf("an operation refused with %s: %+v", kind, got)
		}
		got := holdpoint(dir, "", "start", "web", "--json")
		if got.code != code || got.stderr != want.stderr || !strings.Contains(got.stdout, `"kind": "`+string(kind)+`"`) {
			t.Errorf("with --json: %+v", got)
		}
	}
}
