// Package script_test runs sessions with the real binary, daemon, monitors and
// guest agent included, on the fake hypervisor. The sessions are in testdata;
// the commands they have besides testscript's own are listed at commands.
package script_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// The sessions. Each runs in a home of its own; what it started is ended even
// when it failed.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		Setup:               setup,
		Cmds:                commands,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		ContinueOnError:     false,
	})
}

// setup gives a script its home. Its path is short, for sockets, and not below
// $WORK, whose path is not.
func setup(env *testscript.Env) error {
	dir, err := os.MkdirTemp("/tmp", "hps")
	if err != nil {
		return err
	}
	s := &session{home: filepath.Join(dir, "h"), faults: filepath.Join(dir, "faults"), binary: binary()}
	for _, path := range []string{s.home, s.faults} {
		if err := os.Mkdir(path, 0o700); err != nil {
			return err
		}
	}
	env.Values[sessionKey{}] = s
	env.Setenv("HOME", dir)
	env.Setenv("HOLDPOINT_HOME", s.home)
	env.Setenv("FAULTS", s.faults)
	env.Setenv(faultsVariable, s.faults)
	env.Setenv("NO_COLOR", "1")
	env.Defer(func() {
		if err := s.end(); err != nil {
			env.T().Log(err)
			env.T().FailNow()
		}
		if err := os.RemoveAll(dir); err != nil {
			env.T().Log(fmt.Sprint(err))
		}
	})
	return nil
}
