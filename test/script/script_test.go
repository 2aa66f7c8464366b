// Package script_test runs sessions with the real binary, daemon, monitors and
// guest agent included, on the fake hypervisor. The sessions are in testdata;
// the commands they have besides testscript's own are listed at commands.
package script_test

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/test/session"
)

// The sessions. Each runs in a home of its own; what it started is ended even
// when it failed.
func TestScripts(t *testing.T) {
	p := params("testdata", setup)
	p.Deadline = time.Now().Add(patience)
	testscript.Run(t, p)
}

// patience is for all sessions: one that hangs is ended and tells where, with
// time left for the tests that follow.
const patience = 6 * time.Minute

func params(dir string, setup func(*testscript.Env) error) testscript.Params {
	return testscript.Params{
		Dir:                 dir,
		Setup:               setup,
		Cmds:                commands(),
		Condition:           condition,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		ContinueOnError:     false,
	}
}

// condition knows [agent]: this build has the guest agent in it.
func condition(name string) (bool, error) {
	if name != "agent" {
		return false, fmt.Errorf("unknown condition %q", name)
	}
	_, err := os.Stat("../../internal/image/embedded/holdpoint-agent")
	return err == nil, nil
}

// setup gives a script its session.
func setup(env *testscript.Env) error {
	_, err := scriptSession(env)
	return err
}

func scriptSession(env *testscript.Env) (*session.Session, error) {
	s, err := session.New()
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(faultsOf(s), 0o700); err != nil {
		return nil, err
	}
	// Scripts that are about what the daemon does by itself switch it on.
	s.Env = append(s.Env, faultsVariable+"="+faultsOf(s), "HOLDPOINT_VERIFY=off", "HOLDPOINT_FIRST_BOOTS=off")
	s.Setup(env)
	return s, nil
}

// commands are those of sessions, and:
//
//	image NAME [ARCH]   puts an image of a fake disk into the home
//	spoil NAME          changes the kernel of an image
//	fault NAME [TEXT]   makes machines misbehave, see machinetest.FakeConfig
//	unfault NAME        and no more
//	killmonitors        SIGKILL to all monitors
//	otherbuild          makes $OTHER, a holdpoint of another build
func commands() map[string]func(*testscript.TestScript, bool, []string) {
	all := session.Commands()
	maps.Copy(all, map[string]func(*testscript.TestScript, bool, []string){
		"image":        cmdImage,
		"spoil":        cmdSpoil,
		"fault":        cmdFault,
		"unfault":      cmdUnfault,
		"otherbuild":   cmdOtherBuild,
		"killmonitors": cmdKillMonitors,
	})
	return all
}

// newSession is a session with an image, for tests that are no scripts.
func newSession(t *testing.T) *session.Session {
	t.Helper()
	s, err := session.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.End(); err != nil {
			t.Error(err)
		}
	})
	if s.Binary, err = exec.LookPath("holdpoint"); err != nil {
		t.Fatal(err)
	}
	if err := putImage(s, "debian", image.Architecture); err != nil {
		t.Fatal(err)
	}
	return s
}
