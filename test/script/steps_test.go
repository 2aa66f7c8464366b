package script_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// The files in a session's folder of faults that make a step of a daemon or a
// monitor fail: what is to happen, the steps since then, and how many there were.
const (
	stepsOrder = "steps"
	stepsTrace = "steps.trace"
	stepsCount = "steps.count"
)

// stepOrder is what is to happen at the N-th step of the processes of a kind; N is 0
// for nothing.
type stepOrder struct {
	kind string
	n    int
	// action is kill (the process ends before the step), error (the step fails), or
	// full (there is no room for it, nor for any later one).
	action string
}

// stepFaults is a door to the disk at which a process of the kind carries out what
// was ordered in the folder; nil without one.
func stepFaults(folder, kind string) *durable.FS {
	if folder == "" {
		return nil
	}
	return &durable.FS{Before: func(s durable.Step) error {
		var o stepOrder
		text, err := os.ReadFile(filepath.Join(folder, stepsOrder))
		if err != nil {
			return nil // nothing was ordered
		}
		if _, err := fmt.Sscan(string(text), &o.kind, &o.n, &o.action); err != nil || o.kind != kind {
			return nil
		}
		n, err := note(folder, kind, s)
		switch {
		case err != nil:
			return err
		case o.n == 0 || n < o.n || n > o.n && o.action != "full" || o.action == "full" && !wantsRoom(s):
			return nil
		case o.action == "kill":
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		case o.action == "full":
			return errdefs.New(errdefs.NoSpace, "%s: %w", s, syscall.ENOSPC)
		}
		return errdefs.New(errdefs.Storage, "%s: %w", s, syscall.EIO)
	}}
}

// wantsRoom reports whether a step can fail because the disk is full.
func wantsRoom(s durable.Step) bool {
	switch s.Op {
	case durable.OpCreate, durable.OpWrite, durable.OpSync, durable.OpMkdir, durable.OpCommit:
		return true
	}
	return false
}

// note counts a step, writes it down, and says the how manieth it is.
func note(folder, kind string, s durable.Step) (n int, err error) {
	f, err := os.OpenFile(filepath.Join(folder, stepsCount), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil { // until it is closed
		return 0, err
	}
	if _, err := fmt.Fscan(f, &n); err != nil {
		n = 0 // the first one
	}
	n++
	if _, err := f.WriteAt(fmt.Appendf(nil, "%d\n", n), 0); err != nil {
		return 0, err
	}
	trace, err := os.OpenFile(filepath.Join(folder, stepsTrace), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	_, err = fmt.Fprintf(trace, "%s %d %s\n", kind, n, anonymous(s))
	return n, errors.Join(err, trace.Close())
}

// anonymous is a step without what differs from time to time.
func anonymous(s durable.Step) string {
	text := regexp.MustCompile(`/\S*/h(ome)?/`).ReplaceAllString(s.String(), "")
	return regexp.MustCompile(`[0-9a-f]{16,}`).ReplaceAllString(text, "ID")
}

// order has the faults of a session's folder come about, and forgets the steps so far.
func order(folder string, o stepOrder) error {
	if err := disarm(folder); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, stepsOrder), fmt.Appendf(nil, "%s %d %s\n", o.kind, o.n, o.action), 0o600)
}

// disarm ends them.
func disarm(folder string) error {
	for _, name := range []string{stepsOrder, stepsTrace, stepsCount} {
		if err := os.Remove(filepath.Join(folder, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
