//go:build linux

// Package command runs the commands of a guest: it starts them as a user, in a
// session of their own, keeps what they print until it is read, and learns how
// they ended. It does not know who asks for them or over what.
package command

import (
	"context"
	"maps"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/agent/oom"
)

// Family is all child processes of this process, and the only place that
// waits for any: a process that is init gets children that others started,
// and must reap them without taking the exit status of its own.
type Family struct {
	reapAll bool
	shield  *oom.Shield
	signals chan os.Signal
	kick    chan struct{}
	quit    chan struct{}
	loop    sync.WaitGroup

	mu       sync.Mutex
	starting int // children between fork and their entry in children
	children map[int]*Child
	empty    bool
	changed  chan struct{} // closed at each change
}

// Child is one started process. Done is closed when it has ended.
type Child struct {
	PID    int
	done   chan struct{}
	status syscall.WaitStatus
}

// NewFamily begins to wait for children; with reapAll also for those that
// this process inherits. shield is this process's, nil for none. Close ends it.
func NewFamily(reapAll bool, shield *oom.Shield) *Family {
	f := &Family{
		reapAll: reapAll, shield: shield,
		signals: make(chan os.Signal, 1), kick: make(chan struct{}, 1), quit: make(chan struct{}),
		children: map[int]*Child{}, empty: true, changed: make(chan struct{}),
	}
	signal.Notify(f.signals, syscall.SIGCHLD)
	f.loop.Go(func() {
		for {
			select {
			case <-f.signals:
			case <-f.kick:
			case <-f.quit:
				return
			}
			f.sweep()
		}
	})
	return f
}

// Close stops waiting for children.
func (f *Family) Close() {
	signal.Stop(f.signals)
	close(f.quit)
	f.loop.Wait()
}

// Start starts a process; the arguments are those of syscall.ForkExec.
func (f *Family) Start(argv0 string, argv []string, attr *syscall.ProcAttr) (*Child, error) {
	f.mu.Lock()
	f.starting++
	f.mu.Unlock()
	var pid int
	var err error
	f.shield.Without(func() { pid, err = syscall.ForkExec(argv0, argv, attr) })
	f.mu.Lock()
	defer f.mu.Unlock()
	f.starting--
	defer f.look() // it may have ended already, and others may wait to be reaped
	if err != nil {
		return nil, err
	}
	c := &Child{PID: pid, done: make(chan struct{})}
	f.children[pid] = c
	f.empty = false
	return c, nil
}

// look has the loop sweep.
func (f *Family) look() {
	select {
	case f.kick <- struct{}{}:
	default:
	}
}

// sweep collects who has ended. While a child is being started its pid is not
// known yet, so that nothing but known children is waited for then.
func (f *Family) sweep() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for pid := range f.children {
		var status syscall.WaitStatus
		if got, err := wait4(pid, &status); err == nil && got == pid {
			f.ended(pid, status)
		}
	}
	f.empty = len(f.children) == 0 && f.starting == 0
	for f.reapAll && f.starting == 0 {
		var status syscall.WaitStatus
		pid, err := wait4(-1, &status)
		if err != nil || pid == 0 {
			f.empty = err != nil // no child at all
			break
		}
		f.ended(pid, status)
	}
	close(f.changed)
	f.changed = make(chan struct{})
}

func wait4(pid int, status *syscall.WaitStatus) (int, error) {
	for {
		got, err := syscall.Wait4(pid, status, syscall.WNOHANG, nil)
		if err != syscall.EINTR {
			return got, err
		}
	}
}

func (f *Family) ended(pid int, status syscall.WaitStatus) {
	if c := f.children[pid]; c != nil {
		c.status = status
		close(c.done)
		delete(f.children, pid)
	}
}

// PIDs are the children that this process started and that run.
func (f *Family) PIDs() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Keys(f.children))
}

// AwaitEmpty waits until no child is left; of those inherited too if this
// Family reaps them.
func (f *Family) AwaitEmpty(ctx context.Context) error {
	f.look()
	for {
		f.mu.Lock()
		empty, changed := f.empty, f.changed
		f.mu.Unlock()
		if empty {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Done is closed when the process has ended.
func (c *Child) Done() <-chan struct{} { return c.done }

// Code is the exit code as a shell tells it: 128+n after signal n. It is
// meaningful after Done.
func (c *Child) Code() int {
	if c.status.Signaled() {
		return 128 + int(c.status.Signal())
	}
	return c.status.ExitStatus()
}
