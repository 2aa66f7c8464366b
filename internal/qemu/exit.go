//go:build linux

package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

// watch waits for the process's exit and says how it was.
func (r *run) watch() {
	status, err := r.proc.wait()
	if err != nil {
		return // closed
	}
	r.mu.Lock()
	_, err = os.Stat(filepath.Join(r.cfg.Dir, killFile))
	r.exit = classify(evidence{
		status: status, killed: r.killed || err == nil,
		ownAccord: isGone(filepath.Join(r.cfg.Dir, pidFile)),
		reason:    shutdownReason(filepath.Join(r.cfg.Dir, eventsOut)),
		printed:   printed(r.cfg),
	})
	client := r.client
	r.mu.Unlock()
	close(r.exited)
	r.stop()
	_ = client.Close() // its socket is closed already
	_ = r.proc.close()
	for _, name := range []string{qmpSocket, linkSocket} {
		_ = os.Remove(filepath.Join(r.cfg.SocketDir, name)) // QEMU does it when it can
	}
}

// evidence is all that is left of a process.
type evidence struct {
	// status is nil when another process was the parent.
	status *unix.WaitStatus
	// killed: Kill was called, here or before.
	killed bool
	// ownAccord: QEMU ran its exit handlers, after closing all disks.
	ownAccord bool
	// reason is the SHUTDOWN event's; empty when there was none.
	reason  string
	printed string
}

// classify decides how a run ended. A guest has shut down only if it said so and
// QEMU then closed its disks and exited by itself.
func classify(e evidence) machine.Exit {
	clean := e.ownAccord && (e.status == nil || e.status.Exited() && e.status.ExitStatus() == 0)
	if clean {
		switch e.reason {
		case "guest-shutdown":
			return machine.Exit{Reason: machine.GuestShutdown}
		case "guest-reset":
			return machine.Exit{Reason: machine.GuestReset}
		case "guest-panic":
			return machine.Exit{Reason: machine.GuestPanic}
		case "host-signal", "host-qmp-quit", "host-ui":
			return machine.Exit{Reason: machine.Killed, Message: e.printed}
		}
	}
	if e.killed {
		return machine.Exit{Reason: machine.Killed}
	}
	how := "the process ended without a word"
	switch {
	case e.status != nil && e.status.Signaled():
		how = fmt.Sprintf("the process was ended by signal %d (%s)", e.status.Signal(), e.status.Signal())
	case e.status != nil && e.status.Exited():
		how = fmt.Sprintf("the process exited with status %d", e.status.ExitStatus())
	}
	if e.reason != "" {
		how += " after " + e.reason
	}
	if e.printed != "" {
		how += ": " + e.printed
	}
	return machine.Exit{Reason: machine.Crashed, Message: how}
}

func isGone(path string) bool {
	_, err := os.Stat(path)
	return os.IsNotExist(err)
}

// shutdownReason is that of the last SHUTDOWN event in the event log.
func shutdownReason(path string) string {
	reason := ""
	for line := range bytes.Lines(tail(path, 64<<10)) {
		e, ok := qmp.ParseEvent(line)
		if !ok || e.Name != qmp.Shutdown {
			continue
		}
		var data struct{ Reason string }
		if json.Unmarshal(e.Data, &data) == nil {
			reason = data.Reason
		}
	}
	return reason
}

// tail reads the last n bytes of a file; nothing when it cannot.
func tail(path string, n int64) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil
	}
	b, _ := io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-n), n)) // what was read counts
	return b
}

// awaitEnd waits for the process to end, no longer than limit, and leaves its
// status to be reaped.
func (p *process) awaitEnd(limit time.Duration) bool {
	_ = p.pidfd.SetReadDeadline(time.Now().Add(limit))
	defer func() { _ = p.pidfd.SetReadDeadline(time.Time{}) }()
	ended := false
	_ = p.conn.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		ended = err == nil && n == 1
		return ended
	})
	return ended
}

// The guest decides how much its console prints, and can make QEMU print and
// report events too; none of it may fill the host's disk. Sizes in bytes.
const (
	logLimit = 8 << 20
	logKeep  = 2 << 20
	// logPause is the least time between two looks, however much is printed.
	logPause = time.Second
)

// keepLogs shortens the run's logs when they have grown too long.
func (r *run) keepLogs(ctx context.Context) {
	path := func(name string) string { return filepath.Join(r.cfg.Dir, name) }
	n, err := watchFiles(path(consoleFile), path(outputFile), path(eventsOut))
	if err != nil {
		r.log.WarnContext(ctx, "logs not watched", "error", err)
		return
	}
	defer n.close()
	for {
		for _, name := range []string{consoleFile, outputFile} {
			if err := shorten(path(name), logLimit, logKeep); err != nil {
				r.log.WarnContext(ctx, "log not shortened", "file", name, "error", err)
			}
		}
		if err := punch(path(eventsOut), logLimit, logKeep); err != nil {
			r.log.WarnContext(ctx, "event log not shortened", "error", err)
		}
		if n.wait(ctx) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(logPause):
		}
	}
}

// shorten leaves about the last keep bytes of a log that is longer than limit.
// Its writer appends, so it goes on behind what was kept; what it writes
// meanwhile may come before it.
func shorten(path string, limit, keep int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || st.Size() <= limit {
		return err
	}
	kept := tail(path, keep)
	if i := bytes.IndexByte(kept, '\n'); i >= 0 {
		kept = kept[i+1:]
	}
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err = f.Write(kept)
	return err
}

// punch frees all but the last keep bytes of a file whose writer does not append.
func punch(path string, limit, keep int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if ok && sys.Blocks*512 <= limit || st.Size() <= limit {
		return nil
	}
	err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, st.Size()-keep)
	if err == unix.EOPNOTSUPP {
		return nil
	}
	return err
}
