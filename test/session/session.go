// Package session is what tests with the real binary share: a holdpoint home of
// their own in which daemons, monitors and machines run, the commands that
// scripts have for it, and the proof that nothing half-made is left in it. It
// is for tests only.
package session

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"
)

// patience is how long anything awaited may take before a script fails; a
// healthy run needs a small part of it.
const patience = 20 * time.Second

// keepVariable keeps sessions' folders, to look at what failed.
const keepVariable = "HOLDPOINT_TEST_KEEP"

type key struct{}

// Session is a holdpoint home with all that runs in it. Its life: New; Setup
// for a script; End, which ends all that runs and removes the home.
type Session struct {
	// Dir is the session's own folder, Home the holdpoint home in it.
	Dir, Home string
	// Binary is the holdpoint that Run and its like run.
	Binary string
	// Env is added to the environment of what commands run.
	Env []string
}

// New makes a session. Its path is short, for sockets.
func New() (*Session, error) {
	parent := os.TempDir()
	if len(parent) > 30 {
		parent = "/tmp"
	}
	dir, err := os.MkdirTemp(parent, "hps")
	if err != nil {
		return nil, err
	}
	s := &Session{Dir: dir, Home: filepath.Join(dir, "h")}
	s.Env = []string{"HOME=" + dir, "HOLDPOINT_HOME=" + s.Home, "NO_COLOR=1"}
	return s, os.Mkdir(s.Home, 0o700)
}

// Setup makes s the session of a script, which ends it.
func (s *Session) Setup(env *testscript.Env) {
	env.Values[key{}] = s
	for _, pair := range s.Env {
		name, value, _ := strings.Cut(pair, "=")
		env.Setenv(name, value)
	}
	env.Defer(func() {
		if err := s.End(); err != nil {
			env.T().Log(err)
			env.T().FailNow()
		}
	})
}

// Of is the script's session.
func Of(ts *testscript.TestScript) *Session {
	return ts.Value(key{}).(*Session)
}

// Process is a process that belongs to the session.
type Process struct {
	PID     int
	Cmdline string
}

// IsDaemon tells a daemon.
func (p Process) IsDaemon() bool { return strings.Contains(p.Cmdline, " daemon run ") }

// IsMonitor tells a machine's monitor.
func (p Process) IsMonitor() bool { return strings.Contains(p.Cmdline, " monitor ") }

// IsMachine tells the process that is a machine, of QEMU or of the fake.
func (p Process) IsMachine() bool {
	return strings.Contains(p.Cmdline, " fake-hypervisor machine ") || strings.Contains(p.Cmdline, "qemu-system-") && !p.IsMonitor()
}

// Processes are the living ones of the session: those that have its home in
// their environment or arguments, or work in a folder below it.
func (s *Session) Processes() ([]Process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var found []Process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		dir := filepath.Join("/proc", e.Name())
		cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || len(cmdline) == 0 { // gone, or a zombie
			continue
		}
		environ, _ := os.ReadFile(filepath.Join(dir, "environ"))
		cwd, _ := os.Readlink(filepath.Join(dir, "cwd"))
		if bytes.Contains(environ, []byte("HOLDPOINT_HOME="+s.Home+"\x00")) || bytes.Contains(cmdline, []byte(s.Home)) ||
			strings.HasPrefix(cwd, s.Home+"/") {
			found = append(found, Process{pid, strings.ReplaceAll(string(cmdline), "\x00", " ")})
		}
	}
	return found, nil
}

// End ends the session.
func (s *Session) End() error {
	if err := s.killAll(); err != nil {
		return err
	}
	if os.Getenv(keepVariable) != "" {
		fmt.Fprintln(os.Stderr, "kept", s.Dir)
		return nil
	}
	return os.RemoveAll(s.Dir)
}

// killAll kills all the session's processes, the starters before the started,
// and returns when they are gone.
func (s *Session) killAll() error {
	deadline := time.Now().Add(patience)
	for {
		procs, err := s.Processes()
		if err != nil {
			return err
		}
		if len(procs) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes do not end: %v", procs)
		}
		slices.SortStableFunc(procs, func(a, b Process) int { return rank(a) - rank(b) })
		for _, p := range procs {
			if err := KillAndWait(p.PID); err != nil {
				return err
			}
		}
	}
}

func rank(p Process) int {
	switch {
	case p.IsDaemon():
		return 0
	case p.IsMonitor():
		return 1
	}
	return 2
}

// KillAndWait ends a process and returns when it is gone.
func KillAndWait(pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	} else if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, int(patience.Milliseconds()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && n == 0 {
			err = errors.New("it does not end")
		}
		if err != nil {
			return fmt.Errorf("kill process %d: %w", pid, err)
		}
		return nil
	}
}

// Await calls check until it gives nil, and returns its last error when the
// session's patience is over. For what has no event to wait for.
func Await(check func() error) error {
	deadline := time.Now().Add(patience)
	for {
		err := check()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}
