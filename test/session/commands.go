package session

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
)

// Commands are what scripts have besides testscript's own:
//
//	code N CMD…            CMD ends with exit code N
//	fails N PATTERN CMD…   CMD ends with exit code N, and says one line on stderr
//	                       that matches and begins with "holdpoint: "
//	[!] json PATH PATTERN  in the JSON of the last stdout the value at PATH, such
//	                       as machines.0.name or machines.len, matches; or, without
//	                       a pattern, is there
//	keep NAME PATH         sets the variable NAME to the value at PATH
//	await PATTERN CMD…     repeats CMD until it succeeds and its output matches
//	api METHOD JSON        calls the daemon's API with JSON over HTTP; stdout is
//	                       the answer; METHOD is such as MachineService/Get
//	kill9 daemon|standbys|monitor|machine [NAME]   SIGKILL, and wait until it
//	                       is gone; of standbys their machines
//	clean                  nothing is half-made, see Session.Clean
//	running N              N machines and standbys run, each with one monitor
//	terminal N INPUT CMD…  runs CMD on a terminal of 80 × 24, types INPUT (\r is
//	                       Return, ^P and ^Q are themselves) once CMD has said
//	                       something and waits, and wants exit code N; stdout is all
//	                       that was on the terminal
//	httpget URL PATTERN    the proxy answers with what matches, status line included
func Commands() map[string]func(*testscript.TestScript, bool, []string) {
	return map[string]func(*testscript.TestScript, bool, []string){
		"code":     cmdCode,
		"fails":    cmdFails,
		"json":     cmdJSON,
		"keep":     cmdKeep,
		"await":    cmdAwait,
		"api":      cmdAPI,
		"kill9":    cmdKill9,
		"clean":    cmdClean,
		"running":  cmdRunning,
		"httpget":  cmdHTTPGet,
		"terminal": cmdTerminal,
	}
}

// exitCode is that of a command run by ts.Exec.
func exitCode(ts *testscript.TestScript, err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	ts.Fatalf("%v", err)
	return 0
}

// Usage fails the script when a command has too few arguments.
func Usage(ts *testscript.TestScript, neg bool, args []string, least int, text string) {
	if neg || len(args) < least {
		ts.Fatalf("usage: %s", text)
	}
}

func cmdCode(ts *testscript.TestScript, neg bool, args []string) {
	Usage(ts, neg, args, 2, "code N CMD…")
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	if got := exitCode(ts, ts.Exec(args[1], args[2:]...)); got != want {
		ts.Fatalf("exit code is %d, want %d", got, want)
	}
}

func cmdFails(ts *testscript.TestScript, neg bool, args []string) {
	Usage(ts, neg, args, 3, "fails N PATTERN CMD…")
	cmdCode(ts, false, append(args[:1:1], args[2:]...))
	line := ts.ReadFile("stderr")
	pattern, err := regexp.Compile("(?m)" + args[1])
	ts.Check(err)
	switch {
	case !strings.HasPrefix(line, "holdpoint: ") || strings.Count(line, "\n") != 1 || !strings.HasSuffix(line, "\n"):
		ts.Fatalf("stderr is not one line of holdpoint's: %q", line)
	case !pattern.MatchString(line):
		ts.Fatalf("stderr does not match %q: %q", args[1], line)
	}
}

// LookUp finds the value at path in the JSON of the last stdout.
func LookUp(ts *testscript.TestScript, path string) (string, bool) {
	var value any
	dec := json.NewDecoder(strings.NewReader(ts.ReadFile("stdout")))
	dec.UseNumber()
	if err := dec.Decode(&value); err != nil {
		ts.Fatalf("stdout is no JSON: %v", err)
	}
	if dec.More() {
		ts.Fatalf("stdout is more than one object")
	}
	for key := range strings.SplitSeq(path, ".") {
		switch v := value.(type) {
		case map[string]any:
			next, ok := v[key]
			if !ok {
				return "", false
			}
			value = next
		case []any:
			if key == "len" {
				value = len(v)
				continue
			}
			i, err := strconv.Atoi(key)
			if err != nil || i >= len(v) {
				return "", false
			}
			value = v[i]
		default:
			return "", false
		}
	}
	if s, ok := value.(string); ok {
		return s, true
	}
	text, err := json.Marshal(value)
	ts.Check(err)
	return string(text), true
}

func cmdJSON(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 1 || len(args) > 2 {
		ts.Fatalf("usage: [!] json PATH [PATTERN]")
	}
	value, ok := LookUp(ts, args[0])
	if len(args) == 1 {
		if ok == neg {
			ts.Fatalf("%s is there: %v", args[0], ok)
		}
		return
	}
	if !ok {
		ts.Fatalf("there is no %s", args[0])
	}
	matches, err := regexp.MatchString(args[1], value)
	ts.Check(err)
	if matches == neg {
		ts.Fatalf("%s is %q", args[0], value)
	}
}

func cmdKeep(ts *testscript.TestScript, neg bool, args []string) {
	Usage(ts, neg, args, 2, "keep NAME PATH")
	value, ok := LookUp(ts, args[1])
	if !ok {
		ts.Fatalf("there is no %s", args[1])
	}
	ts.Setenv(args[0], value)
}

func cmdAwait(ts *testscript.TestScript, neg bool, args []string) {
	Usage(ts, neg, args, 2, "await PATTERN CMD…")
	pattern, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	var out bytes.Buffer
	ts.Check(Await(func() error {
		cmd := exec.Command(Of(ts).program(args[1]), args[2:]...)
		cmd.Env = append(os.Environ(), Of(ts).Env...)
		cmd.Dir = ts.MkAbs(".")
		out.Reset()
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Run(); err != nil || !pattern.Match(out.Bytes()) {
			return fmt.Errorf("%v never gave %q; last: %v\n%s", args[1:], args[0], err, out.Bytes())
		}
		return nil
	}))
	setStdout(ts, out.Bytes())
}

// setStdout makes text the last stdout.
func setStdout(ts *testscript.TestScript, text []byte) {
	path := ts.MkAbs(".stdout")
	ts.Check(os.WriteFile(path, text, 0o600))
	ts.Check(ts.Exec("cat", path))
}
