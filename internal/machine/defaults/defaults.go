// Package defaults says as whom, where and with which environment the programs
// of a machine run when nobody says otherwise, and what its image runs at boot.
// It starts none: the guest agent does.
package defaults

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/shellwords"
)

// maxBytes bounds all texts of Defaults together: they are kept with each
// machine and each of its checkpoints.
const maxBytes = 32 << 10

// Defaults are what an image says about the programs of its machines. Recorded
// in an image's manifest and in the spec of a machine, in this JSON form.
type Defaults struct {
	// User is a name or number, or USER:GROUP; empty for root.
	User string `json:"user,omitempty"`
	// Env is NAME=value.
	Env []string `json:"env,omitempty"`
	// WorkingDir is absolute and clean; empty for the user's home.
	WorkingDir string `json:"working_dir,omitempty"`
	// Command is run at every boot, without a shell; empty for none.
	Command []string `json:"command,omitempty"`
}

// IsZero reports whether they say nothing.
func (d Defaults) IsZero() bool {
	return d.User == "" && d.WorkingDir == "" && len(d.Env) == 0 && len(d.Command) == 0
}

// Check refuses (INVALID) what no program can be run with.
func (d Defaults) Check() error {
	size := 0
	for _, text := range slices.Concat([]string{d.User, d.WorkingDir}, d.Env, d.Command) {
		if size += len(text) + 1; strings.ContainsRune(text, 0) || !utf8.ValidString(text) {
			return errdefs.New(errdefs.Invalid, "the defaults of its programs: %.100q has a zero byte or is not UTF-8", text)
		}
	}
	for _, e := range d.Env {
		if i := strings.IndexByte(e, '='); i < 1 {
			return errdefs.New(errdefs.Invalid, "the defaults of its programs: the variable %.100q is not NAME=value", e)
		}
	}
	switch {
	case size > maxBytes:
		return errdefs.New(errdefs.Invalid, "the defaults of its programs: environment and command have more than %d KiB", maxBytes>>10)
	case d.WorkingDir != "" && (!path.IsAbs(d.WorkingDir) || path.Clean(d.WorkingDir) != d.WorkingDir):
		return errdefs.New(errdefs.Invalid, "the defaults of its programs: the folder %.100q is no absolute path", d.WorkingDir)
	case len(d.Command) > 0 && d.Command[0] == "":
		return errdefs.New(errdefs.Invalid, "the defaults of its programs: the command is empty")
	}
	return nil
}

// Digest is the sha256 of the JSON form, 64 lower-case hexadecimal digits.
func (d Defaults) Digest() string {
	data, _ := json.Marshal(d) // of texts it cannot fail
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// Complete gives a command what nobody said about it. The shell of verb shell
// is no login shell then where there is an environment: a login would set
// another PATH.
func (d Defaults) Complete(start *agentv1.ExecStart) {
	if start.GetUser() == "" {
		start.User = d.User
	}
	if start.GetCwd() == "" {
		start.Cwd = d.WorkingDir
	}
	if len(d.Env) == 0 {
		return
	}
	start.Env = slices.Concat(d.Env, start.GetEnv())
	if shellwords.IsLoginShell(start.GetArgv()) {
		start.Argv = shellwords.Shell()
	}
}

// OnBoot is what runs at boot: a script by the shell, or the command without
// one; nil for nothing.
func (d Defaults) OnBoot(script string) *agentv1.ExecStart {
	start := &agentv1.ExecStart{Argv: d.Command}
	if len(d.Command) == 0 {
		start.Argv = []string{"/bin/sh", "-c", script}
		if script == "" {
			return nil
		}
	}
	d.Complete(start)
	return start
}

// Message is the form in which processes tell it each other.
func (d Defaults) Message() *agentv1.ExecStart {
	if d.IsZero() {
		return nil
	}
	return &agentv1.ExecStart{Argv: d.Command, Env: d.Env, Cwd: d.WorkingDir, User: d.User}
}

// Of reads a Message.
func Of(m *agentv1.ExecStart) Defaults {
	return Defaults{User: m.GetUser(), Env: m.GetEnv(), WorkingDir: m.GetCwd(), Command: m.GetArgv()}
}
