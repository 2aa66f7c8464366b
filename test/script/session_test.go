package script_test

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

type sessionKey struct{}

// session is what one script owns.
type session struct {
	home   string
	faults string
	binary string
}

func sessionOf(ts *testscript.TestScript) *session {
	return ts.Value(sessionKey{}).(*session)
}

// proc is a process that belongs to the session.
type proc struct {
	pid     int
	cmdline string
}

// isMonitor, isDaemon and isFake tell the processes of the binary apart.
func (p proc) isMonitor() bool { return strings.Contains(p.cmdline, " monitor ") }
func (p proc) isDaemon() bool  { return strings.Contains(p.cmdline, " daemon ") }
func (p proc) isFake() bool    { return strings.Contains(p.cmdline, " fake-hypervisor ") }

// processes are the living ones of the session: those that have its home in
// their environment or arguments, or work in a folder below it.
func (s *session) processes() ([]proc, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var found []proc
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
		if bytes.Contains(environ, []byte("HOLDPOINT_HOME="+s.home+"\x00")) || bytes.Contains(cmdline, []byte(s.home)) ||
			strings.HasPrefix(cwd, s.home+"/") {
			found = append(found, proc{pid, strings.ReplaceAll(string(cmdline), "\x00", " ")})
		}
	}
	return found, nil
}

// end kills all the session's processes, the starters before the started, and
// returns when they are gone.
func (s *session) end() error {
	deadline := time.Now().Add(patience)
	for {
		procs, err := s.processes()
		if err != nil {
			return err
		}
		if len(procs) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes do not end: %v", procs)
		}
		slices.SortStableFunc(procs, func(a, b proc) int { return rank(a) - rank(b) })
		for _, p := range procs {
			if err := killAndWait(p.pid); err != nil {
				return err
			}
		}
	}
}

func rank(p proc) int {
	switch {
	case p.isDaemon():
		return 0
	case p.isMonitor():
		return 1
	}
	return 2
}

// killAndWait ends a process and returns when it is gone.
func killAndWait(pid int) error {
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

// await calls check until it gives nil, and returns its last error when the
// session's patience is over. For what has no event to wait for.
func await(check func() error) error {
	deadline := time.Now().Add(patience)
	for {
		err := check()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}
