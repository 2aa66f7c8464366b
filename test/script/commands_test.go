package script_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdpoint/holdpoint/test/session"
)

// faultsOf is the folder of a session's faults.
func faultsOf(s *session.Session) string { return filepath.Join(s.Dir, "faults") }

func cmdFault(ts *testscript.TestScript, neg bool, args []string) {
	session.Usage(ts, neg, args, 1, "fault NAME [TEXT]")
	path := filepath.Join(faultsOf(session.Of(ts)), args[0])
	ts.Check(os.WriteFile(path, []byte(strings.Join(args[1:], " ")), 0o600))
}

func cmdUnfault(ts *testscript.TestScript, neg bool, args []string) {
	session.Usage(ts, neg, args, 1, "unfault NAME")
	ts.Check(os.Remove(filepath.Join(faultsOf(session.Of(ts)), args[0])))
}

// cmdOtherBuild copies the binary with another build id. The id is in the ELF
// note that the Go linker writes (cmd/internal/buildid); nothing else reads it.
func cmdOtherBuild(ts *testscript.TestScript, neg bool, args []string) {
	session.Usage(ts, neg, args, 0, "otherbuild")
	data, err := os.ReadFile(thisProgram())
	ts.Check(err)
	note := []byte("\x04\x00\x00\x00Go\x00\x00")
	i := bytes.Index(data[:32<<10], note)
	if i < 0 {
		ts.Check(errors.New("the binary has no build id"))
	}
	id := data[i+len(note):]
	if id[0] == 'x' {
		id[0] = 'y'
	} else {
		id[0] = 'x'
	}
	dir := filepath.Join(session.Of(ts).Dir, "other")
	ts.Check(os.Mkdir(dir, 0o700))
	ts.Check(os.WriteFile(filepath.Join(dir, "holdpoint"), data, 0o700))
	ts.Check(os.Symlink("holdpoint", filepath.Join(dir, "holdpoint2")))
	ts.Setenv("OTHER", filepath.Join(dir, "holdpoint"))
}

// cmdKillMonitors kills all monitors, also those of machines that are booting.
func cmdKillMonitors(ts *testscript.TestScript, neg bool, args []string) {
	session.Usage(ts, neg, args, 0, "killmonitors")
	ts.Check(session.Of(ts).Kill(session.Monitor))
}
