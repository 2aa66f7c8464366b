//go:build linux

package command

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	// Exit codes of commands that did not run, as POSIX shells give them.
	notFound  = 127
	cannotRun = 126

	// Ended commands on their own whose exit code nobody has read: how many are
	// kept, and how much of their output in all, in bytes.
	keptEnded       = 128
	keptEndedOutput = 8 << 20

	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// Config says what world commands live in.
type Config struct {
	Family *Family
	// World is the folder that is the machine's root to its user; "/" in a
	// guest. Elsewhere commands are plain processes that start in it and
	// could leave it.
	World string
	// Path is the default PATH; empty for the usual one.
	Path string
}

// Spec is a command to start.
type Spec struct {
	Argv       []string
	Env        []string // KEY=VALUE, added to the default
	Dir        string   // empty: the user's home
	User       string   // "user" or "user:group", names or numbers; empty is root
	TTY        bool
	Rows, Cols uint32
	Detached   bool
}

// StartError says why a command did not run, and the exit code for it.
type StartError struct {
	Code int
	err  error
}

// Error is the reason in one line.
func (e *StartError) Error() string { return e.err.Error() }

// Unwrap gives the cause.
func (e *StartError) Unwrap() error { return e.err }

func cannot(code int, kind errdefs.Kind, format string, args ...any) error {
	return &StartError{code, errdefs.New(kind, format, args...)}
}

// Set is the commands of one machine.
type Set struct {
	cfg Config
	run sync.WaitGroup

	mu       sync.Mutex
	commands map[string]*Command
	ended    []*Command // on their own, exit code unread, oldest first
}

// NewSet returns a set without commands.
func NewSet(cfg Config) *Set {
	if cfg.Path == "" {
		cfg.Path = defaultPath
	}
	return &Set{cfg: cfg, commands: map[string]*Command{}}
}

// Start starts a command. The error is a *StartError when the command itself
// is at fault.
func (s *Set) Start(spec Spec) (*Command, error) {
	if len(spec.Argv) == 0 || spec.Argv[0] == "" {
		return nil, cannot(cannotRun, errdefs.Invalid, "run: the command is empty")
	}
	attr, path, err := s.prepare(spec)
	if err != nil {
		return nil, err
	}
	c := &Command{
		ID: newID(), Argv: spec.Argv, Detached: spec.Detached, TTY: spec.TTY, Started: time.Now(),
		out: newOutput(!spec.Detached), done: make(chan struct{}), hung: make(chan struct{}),
	}
	e, err := newEnds(spec, attr.Sys.Credential)
	if err != nil {
		return nil, err
	}
	for _, f := range e.far {
		attr.Files = append(attr.Files, f.Fd())
	}
	attr.Sys.Setsid, attr.Sys.Setctty, attr.Sys.Ctty = true, spec.TTY, 0
	c.child, err = s.cfg.Family.Start(path, spec.Argv, attr)
	e.closeFar()
	if err != nil {
		e.closeNear()
		return nil, execError(spec.Argv[0], err)
	}
	s.begin(c, e)
	return c, nil
}

// begin attends to the started command.
func (s *Set) begin(c *Command, e *ends) {
	c.term = e.term
	c.in = newInput(e.in, c.TTY)
	s.mu.Lock()
	s.commands[c.ID] = c
	s.mu.Unlock()
	var pumps sync.WaitGroup
	for _, src := range e.out {
		pumps.Go(func() { src.pump(c.out) })
	}
	s.run.Go(func() {
		c.attend(e.out, &pumps)
		s.hasEnded(c)
	})
}

// hasEnded keeps a command that is on its own for whoever comes to read its
// exit code.
func (s *Set) hasEnded(c *Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.OnItsOwn() {
		s.keepEnded(c)
	}
}

// Keep leaves a command on its own whose user vanished: it goes on, and then
// its exit code and the end of its output wait for whoever attaches.
func (s *Set) Keep(c *Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.OnItsOwn() {
		return
	}
	c.kept.Store(true)
	select {
	case <-c.done:
		s.keepEnded(c)
	default: // hasEnded is still to come
	}
}

// keepEnded bounds what is kept. The caller holds mu.
func (s *Set) keepEnded(c *Command) {
	if s.commands[c.ID] == nil || slices.Contains(s.ended, c) {
		return
	}
	s.ended = append(s.ended, c)
	for len(s.ended) > keptEnded {
		delete(s.commands, s.ended[0].ID)
		s.ended = s.ended[1:]
	}
	total := uint64(0)
	for _, e := range slices.Backward(s.ended) {
		if total += e.out.size(); total > keptEndedOutput {
			e.out.forget()
		}
	}
}

// Forget removes a command whose exit code was read, or whose user is gone.
func (s *Set) Forget(c *Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.commands, c.ID)
	s.ended = slices.DeleteFunc(s.ended, func(e *Command) bool { return e == c })
}

// Get finds a command by its id.
func (s *Set) Get(id string) (*Command, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.commands[id]; c != nil {
		return c, nil
	}
	return nil, errdefs.New(errdefs.NotFound, "command %q: no such command; it may have ended and been read", id)
}

// List is all commands, oldest first.
func (s *Set) List() []*Command {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*Command, 0, len(s.commands))
	for _, c := range s.commands {
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b *Command) int { return a.Started.Compare(b.Started) })
	return list
}

// Wait waits until no command runs.
func (s *Set) Wait() { s.run.Wait() }

// prepare finds the user, the folder, the environment and the program.
func (s *Set) prepare(spec Spec) (*syscall.ProcAttr, string, error) {
	u, err := lookUp(s.cfg.World, spec.User)
	if err != nil {
		return nil, "", &StartError{cannotRun, err}
	}
	attr := &syscall.ProcAttr{Sys: &syscall.SysProcAttr{}}
	inWorld := s.cfg.World == "/"
	if inWorld || spec.User != "" {
		attr.Sys.Credential = &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: u.groups}
	}
	if !inWorld {
		u.home = s.cfg.World
	}
	if attr.Dir, err = s.folder(spec.Dir, u.home); err != nil {
		return nil, "", err
	}
	env := s.environment(u)
	if spec.TTY {
		env = append(env, "TERM=xterm-256color")
	}
	attr.Env = mergeEnv(env, spec.Env)
	path, err := findProgram(spec.Argv[0], attr.Dir, attr.Env)
	return attr, path, err
}

func (s *Set) environment(u user) []string {
	return []string{
		"PATH=" + s.cfg.Path, "HOME=" + u.home, "USER=" + u.name, "LOGNAME=" + u.name,
		"SHELL=" + u.shell, "LANG=C.UTF-8",
	}
}

// Spawn starts a program that is none of the set's commands: nobody can attach
// to it, and it is not listed.
func (s *Set) Spawn(spec Spec, sys *syscall.SysProcAttr, files ...*os.File) (*Child, error) {
	attr, path, err := s.prepare(spec)
	if err != nil {
		return nil, err
	}
	sys.Credential, attr.Sys = attr.Sys.Credential, sys
	for _, f := range files {
		attr.Files = append(attr.Files, f.Fd())
	}
	child, err := s.cfg.Family.Start(path, spec.Argv, attr)
	if err != nil {
		return nil, execError(spec.Argv[0], err)
	}
	return child, nil
}

// folder is where a command starts.
func (s *Set) folder(dir, home string) (string, error) {
	if dir == "" {
		if fi, err := os.Stat(home); err == nil && fi.IsDir() {
			return home, nil
		}
		return s.cfg.World, nil
	}
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(home, dir)
	} else if s.cfg.World != "/" {
		dir = filepath.Join(s.cfg.World, dir)
	}
	fi, err := os.Stat(dir)
	if err != nil {
		return "", cannot(cannotRun, errdefs.NotFound, "run in %q: no such folder in the machine", dir)
	}
	if !fi.IsDir() {
		return "", cannot(cannotRun, errdefs.Invalid, "run in %q: it is not a folder", dir)
	}
	return dir, nil
}

// mergeEnv adds to env; the last value of a name counts.
func mergeEnv(env, add []string) []string {
	at := map[string]int{}
	var out []string
	for _, kv := range append(env, add...) {
		name, _, ok := strings.Cut(kv, "=")
		if !ok || name == "" || strings.ContainsRune(kv, 0) {
			continue
		}
		if i, ok := at[name]; ok {
			out[i] = kv
			continue
		}
		at[name] = len(out)
		out = append(out, kv)
	}
	return out
}

// findProgram looks name up as execvp(3) does, in the PATH of env.
func findProgram(name, dir string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		return name, nil
	}
	path := ""
	for _, kv := range env {
		if value, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = value
		}
	}
	denied := false
	for _, d := range filepath.SplitList(path) {
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		full := filepath.Join(d, name)
		fi, err := os.Stat(full)
		if err != nil || fi.IsDir() {
			continue
		}
		if fi.Mode()&0o111 != 0 {
			return full, nil
		}
		denied = true
	}
	if denied {
		return "", cannot(cannotRun, errdefs.Denied, "run %q: the file is not executable", name)
	}
	return "", cannot(notFound, errdefs.NotFound, "run %q: command not found in PATH", name)
}

// execError gives a failed start its exit code.
func execError(name string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return cannot(notFound, errdefs.NotFound, "run %q: no such file, or its interpreter is missing", name)
	case errors.Is(err, fs.ErrPermission):
		return cannot(cannotRun, errdefs.Denied, "run %q: permission denied", name)
	case errors.Is(err, unix.ENOEXEC):
		return cannot(cannotRun, errdefs.Invalid, "run %q: it is no program; a script begins with #!", name)
	}
	return cannot(cannotRun, errdefs.Internal, "run %q: %w", name, err)
}

func newID() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return hex.EncodeToString(b[:])
}
