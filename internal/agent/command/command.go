//go:build linux

package command

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	// hangUpGrace is between SIGHUP and SIGKILL when a command is hung up.
	hangUpGrace = 5 * time.Second
	// drainGrace is how long, after a command's end, what it started in the
	// background may still print, if that holds the output open. Output the
	// command itself wrote is in the pipe by then and never lost; the grace
	// is for helpers like `> >(tee log)`, which end right after.
	drainGrace = 250 * time.Millisecond
	// stdinQueue is how much input waits for a command that does not read;
	// signals and sizes overtake up to that much, in bytes.
	stdinQueue = 1 << 20
)

// Command is one started command. Its life: Set.Start starts it; it prints
// into its output, which readers read; it ends, its output is drained, and
// Wait returns. One that is detached, or kept since its user vanished, stays in
// its Set until its exit code was read.
type Command struct {
	ID       string
	Argv     []string
	Detached bool
	TTY      bool
	Started  time.Time

	child *Child
	out   *output
	in    *input
	term  *os.File // near side of the terminal
	done  chan struct{}

	hangUp sync.Once
	hung   chan struct{} // closed by HangUp

	kept atomic.Bool // by Set.Keep
}

// OnItsOwn reports whether the command belongs to no stream: it was started
// detached, or is kept.
func (c *Command) OnItsOwn() bool { return c.Detached || c.kept.Load() }

// PID is the command's process and its process group.
func (c *Command) PID() int { return c.child.PID }

// Done is closed when the command has ended and its output is complete.
func (c *Command) Done() <-chan struct{} { return c.done }

// Code is the exit code, meaningful after Done.
func (c *Command) Code() int { return c.child.Code() }

// Dropped is how many bytes of output were dropped unread.
func (c *Command) Dropped() uint64 { return c.out.lost() }

// Attached reports whether anybody reads the output.
func (c *Command) Attached() bool { return c.out.attached() }

// Attach returns a reader of the output, from what is kept or from now on.
func (c *Command) Attach(history bool) *Reader { return c.out.attach(history) }

// Write queues input, waiting while too much is queued. A command that does
// not read any more gets none, without an error.
func (c *Command) Write(p []byte) { c.in.write(p) }

// CloseInput ends the input after what is queued.
func (c *Command) CloseInput() { c.in.end() }

// Resize tells the terminal its size; without one it does nothing.
func (c *Command) Resize(rows, cols uint32) {
	if c.term != nil && rows > 0 && cols > 0 {
		_ = resize(c.term, rows, cols) // a terminal that is gone has no size
	}
}

// Signal sends a signal to the command's process group.
func (c *Command) Signal(n syscall.Signal) error {
	if n < 1 || n > 64 {
		return errdefs.New(errdefs.Invalid, "signal %d: use 1 to 64", int(n))
	}
	select {
	case <-c.child.done:
		return nil
	default:
	}
	if err := syscall.Kill(-c.child.PID, n); err != nil && !errors.Is(err, syscall.ESRCH) {
		return os.NewSyscallError("kill", err)
	}
	return nil
}

// HangUp ends a command whose user is gone: SIGHUP, and SIGKILL if that did
// not end it. It does not wait.
func (c *Command) HangUp() {
	c.hangUp.Do(func() { close(c.hung) })
}

// attend waits for the end of the command. pumps are done when its output is.
func (c *Command) attend(outputs []*source, pumps *sync.WaitGroup) {
	hung := c.hung
	var kill <-chan time.Time
wait:
	for {
		select {
		case <-c.child.done:
			break wait
		case <-hung:
			hung = nil
			_ = c.Signal(syscall.SIGHUP)
			_ = c.Signal(syscall.SIGCONT)
			t := time.NewTimer(hangUpGrace)
			defer t.Stop()
			kill = t.C
		case <-kill:
			_ = c.Signal(syscall.SIGKILL)
		}
	}
	for _, s := range outputs {
		s.ended()
	}
	pumps.Wait()
	for _, s := range outputs {
		_ = s.f.Close()
	}
	c.in.stop()
	c.out.close()
	close(c.done)
}
