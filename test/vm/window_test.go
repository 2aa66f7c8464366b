package vm_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/test/session"
)

// TestKilledInWindow kills QEMU at the instant its monitor writes down that a
// window opens: no checkpoint, no leftovers, and the machine boots from its
// disk.
func TestKilledInWindow(t *testing.T) {
	a := newAlive(t)
	a.start(t, "web")
	a.checkpoint(t, "web", "zero")
	a.Must(t, "exec", "web", "--", "sh", "-c", "echo kept >/kept; sync")
	var v struct {
		Machine struct {
			RunID string `json:"run_id"`
			State string
		}
	}
	a.JSON(t, &v, "inspect", "web")
	killed := make(chan error, 1)
	watch := newRecordWatch(t, filepath.Join(a.Home, "runs", v.Machine.RunID))
	go func() { killed <- watch.killAt(monitor.Window) }()
	r, err := a.Run("checkpoint", "create", "web", "--name", "never")
	if err != nil || r.Code == 0 || r.Code == 8 {
		t.Errorf("checkpoint create ended with %d, %v: %s%s", r.Code, err, r.Stdout, r.Stderr)
	}
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	await(t, func() error {
		a.JSON(t, &v, "inspect", "web")
		if v.Machine.State != "stopped" {
			return errors.New("the machine is " + v.Machine.State)
		}
		return nil
	})
	if r, err := a.Run("checkpoint", "show", "never"); err != nil || r.Code != 3 {
		t.Errorf("checkpoint show ended with %d, %v: %s", r.Code, err, r.Stdout)
	}
	a.Must(t, "start", "web")
	a.Must(t, "exec", "web", "--", "cat", "/kept")
	a.clean(t)
	a.checkpoint(t, "web", "next")
	a.Must(t, "restore", "web", "zero", "--full", "--yes")
	a.check(t, "web", report{})
	a.clean(t)
}

// recordWatch is told of each change of a run's record.
type recordWatch struct {
	dir string
	fd  int
}

func newRecordWatch(t *testing.T, dir string) recordWatch {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_MOVED_TO); err != nil {
		t.Fatal(err)
	}
	return recordWatch{dir, fd}
}

// killAt kills the run's process when its record comes to the phase.
func (w recordWatch) killAt(phase monitor.Phase) error {
	for {
		fds := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(time.Minute.Milliseconds()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return errors.Join(err, errors.New("the record does not come to phase "+string(phase)))
		}
		if _, err := unix.Read(w.fd, make([]byte, 4096)); err != nil {
			return err
		}
		r, err := monitor.ReadRecord(w.dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if r.Phase == phase {
			return session.KillAndWait(r.Process.PID)
		}
	}
}
