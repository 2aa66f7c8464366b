package defaults_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/shellwords"
)

func some() defaults.Defaults {
	return defaults.Defaults{User: "app:web", Env: []string{"A=1", "PATH=/opt:/bin"}, WorkingDir: "/srv", Command: []string{"serve", "it's"}}
}

// What the user says wins; of the environment name by name, as the later one does.
func TestComplete(t *testing.T) {
	start := &agentv1.ExecStart{Argv: []string{"x"}}
	some().Complete(start)
	if start.GetUser() != "app:web" || start.GetCwd() != "/srv" || !slices.Equal(start.GetEnv(), some().Env) {
		t.Errorf("%v", start)
	}
	start = &agentv1.ExecStart{Argv: []string{"x"}, User: "root", Cwd: "/", Env: []string{"A=2"}}
	some().Complete(start)
	if start.GetUser() != "root" || start.GetCwd() != "/" || start.GetEnv()[2] != "A=2" {
		t.Errorf("%v", start)
	}
	shell := &agentv1.ExecStart{Argv: shellwords.LoginShell()}
	defaults.Defaults{User: "app"}.Complete(shell)
	if !shellwords.IsLoginShell(shell.GetArgv()) {
		t.Error("without an environment of the image a shell is no login shell")
	}
	some().Complete(shell)
	if shellwords.IsLoginShell(shell.GetArgv()) || strings.Contains(shell.GetArgv()[2], " -l") {
		t.Errorf("a login shell sets another PATH: %q", shell.GetArgv())
	}
}

func TestOnBoot(t *testing.T) {
	if got := some().OnBoot("serve 'it'"); !slices.Equal(got.GetArgv(), []string{"serve", "it's"}) || got.GetUser() != "app:web" || got.GetCwd() != "/srv" {
		t.Errorf("%v", got)
	}
	d := some()
	d.Command = nil
	if got := d.OnBoot("a | b"); !slices.Equal(got.GetArgv(), []string{"/bin/sh", "-c", "a | b"}) || got.GetUser() != "app:web" {
		t.Errorf("%v", got)
	}
	if got := d.OnBoot(""); got != nil {
		t.Errorf("%v", got)
	}
}

func TestMessage(t *testing.T) {
	if diff := cmp.Diff(some(), defaults.Of(some().Message())); diff != "" {
		t.Error(diff)
	}
	if (defaults.Defaults{}).Message() != nil || !defaults.Of(nil).IsZero() {
		t.Error("none is told, too")
	}
}

func TestCheck(t *testing.T) {
	if err := some().Check(); err != nil {
		t.Error(err)
	}
	for says, d := range map[string]defaults.Defaults{
		"zero byte": {User: "a\x00"}, "UTF-8": {Env: []string{"A=\xff"}}, "NAME=value": {Env: []string{"=x"}},
		"absolute": {WorkingDir: "srv"}, "path": {WorkingDir: "/a/../b"}, "empty": {Command: []string{""}},
		"KiB": {Command: []string{strings.Repeat("x", 40<<10)}},
	} {
		if err := d.Check(); !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want %q", err, says)
		}
	}
	same, other := some(), some()
	other.User = "app"
	if same.Digest() != some().Digest() || other.Digest() == some().Digest() {
		t.Error("the digest does not tell them apart")
	}
}
