package link

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/undo"
)

// goneAfter is how long the port must say that no host is connected before
// that is believed. A host that leaves and comes back at once is reported as
// leaving and coming when the new one may have spoken already.
const goneAfter = 250 * time.Millisecond

// unseen is how long a writer may keep a message from a waiting reader.
const unseen = 10 * time.Millisecond

// virtioPort is a virtio-serial port. Linux gives at most one page for each
// read of it, takes at most 32 KiB for each write, and reads nothing, at
// once, while no host is connected (drivers/char/virtio_console.c). It wakes
// whoever waits for it each time that the host has taken a buffer; the
// runtime's poller would schedule a thread for each, so we wait ourselves.
type virtioPort struct {
	fd int
	// edge is an epoll instance with fd alone, edge-triggered: the one way to
	// wait for a host to connect, as poll says POLLHUP at once until then.
	edge        int
	read, write waiter
	// told is whether the reader knows that no host is connected.
	told bool

	mu     sync.Mutex
	users  sync.WaitGroup
	closed bool
}

// OpenPort opens the virtio-serial port at path, /dev/vportNpM. The kernel
// lets a port be opened once only at a time.
func OpenPort(path string) (Port, error) {
	var steps undo.Stack
	defer steps.Run()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open agent port %q: %w", path, err)
	}
	steps.Add(func() { _ = unix.Close(fd) })
	edge, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	steps.Add(func() { _ = unix.Close(edge) })
	interest := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(fd)}
	if err := unix.EpollCtl(edge, unix.EPOLL_CTL_ADD, fd, &interest); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	p := &virtioPort{fd: fd, edge: edge}
	for _, w := range []*waiter{&p.read, &p.write} {
		if w.bell, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
			return nil, os.NewSyscallError("eventfd", err)
		}
		steps.Add(func() { _ = unix.Close(w.bell) })
	}
	steps.Release()
	return p, nil
}

// enter keeps the descriptors open until leave.
func (p *virtioPort) enter() (leave func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, os.ErrClosed
	}
	p.users.Add(1)
	return p.users.Done, nil
}

// Read fills as much of b as is there, waiting for the first byte. It returns
// ErrHostGone once for each time that the host goes.
func (p *virtioPort) Read(b []byte) (int, error) {
	leave, err := p.enter()
	if err != nil {
		return 0, err
	}
	defer leave()
	var gone time.Time // when it will be believed
	for {
		n, err := readAll(p.fd, b)
		switch {
		case n > 0:
			p.told = false
			return n, nil
		case err == nil:
			err = p.read.wait(p.fd, unix.POLLIN, time.Time{})
		case !errors.Is(err, io.EOF):
			return 0, err
		case p.told:
			err = p.awaitHost(time.Time{})
		default:
			if gone.IsZero() {
				gone = time.Now().Add(goneAfter)
			}
			if !time.Now().Before(gone) {
				p.told = true
				return 0, ErrHostGone
			}
			err = p.awaitHost(gone)
		}
		if err != nil {
			return 0, err
		}
	}
}

// awaitHost waits until something changes at the port.
func (p *virtioPort) awaitHost(until time.Time) error {
	err := p.read.wait(p.edge, unix.POLLIN, until)
	var events [1]unix.EpollEvent
	_, _ = unix.EpollWait(p.edge, events[:], 0) // makes the next edge one
	return err
}

// readAll reads until b is full or nothing more is there. It returns no bytes
// and no error when it has to wait, io.EOF when no host is connected.
func readAll(fd int, b []byte) (int, error) {
	n := 0
	for n < len(b) {
		m, err := unix.Read(fd, b[n:])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return n, nil
		case n > 0 && (err != nil || m == 0):
			return n, nil
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case m == 0:
			return 0, io.EOF
		}
		n += m
	}
	return n, nil
}

// Write writes all of b, waiting for the host to take it.
func (p *virtioPort) Write(b []byte) (int, error) {
	leave, err := p.enter()
	if err != nil {
		return 0, err
	}
	defer leave()
	n := 0
	for n < len(b) {
		if p.write.expired() {
			return n, os.ErrDeadlineExceeded
		}
		m, err := unix.Write(p.fd, b[n:])
		switch {
		case err == nil:
			n += m
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			if err := p.awaitRoom(); err != nil {
				return n, err
			}
		default:
			return n, os.NewSyscallError("write", err)
		}
	}
	return n, nil
}

// awaitRoom waits until the port takes more. While no host is connected it
// takes nothing and poll does not wait; the reader learns of the next host.
//
// Any poll of the port may take what has come off its queue before its
// interrupt, which then wakes nobody: a reader that waits in a poll of its own
// would not see it until more comes. So the reader looks again after ours, and
// none of ours that cannot tell lasts long.
func (p *virtioPort) awaitRoom() error {
	fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN | unix.POLLOUT}}
	n, err := unix.Poll(fds, 0)
	if err != nil || n == 0 {
		fds[0].Revents = 0
	}
	if fds[0].Revents&unix.POLLIN != 0 {
		p.read.ring()
	}
	switch {
	case fds[0].Revents&unix.POLLHUP != 0:
		return p.write.wait(-1, 0, time.Now().Add(holdBack))
	case fds[0].Revents&unix.POLLOUT != 0:
		return nil
	}
	defer p.read.ring()
	return p.write.wait(p.fd, unix.POLLOUT, time.Now().Add(unseen))
}

// Close ends what waits and closes the port.
func (p *virtioPort) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return os.ErrClosed
	}
	p.closed = true
	p.mu.Unlock()
	p.read.set(time.Unix(1, 0))
	p.write.set(time.Unix(1, 0))
	p.users.Wait()
	for _, fd := range []int{p.edge, p.read.bell, p.write.bell} {
		_ = unix.Close(fd)
	}
	return os.NewSyscallError("close", unix.Close(p.fd))
}

// SetReadDeadline is that of net.Conn.
func (p *virtioPort) SetReadDeadline(t time.Time) error { return p.setDeadline(&p.read, t) }

// SetWriteDeadline is that of net.Conn.
func (p *virtioPort) SetWriteDeadline(t time.Time) error { return p.setDeadline(&p.write, t) }

func (p *virtioPort) setDeadline(w *waiter, t time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return os.ErrClosed
	}
	w.set(t)
	return nil
}

// waiter waits in one direction, until a deadline that may be moved meanwhile.
type waiter struct {
	bell int // an eventfd, rung when the deadline moves, or to look again

	mu       sync.Mutex
	deadline time.Time
}

func (w *waiter) set(t time.Time) {
	w.mu.Lock()
	w.deadline = t
	w.mu.Unlock()
	w.ring()
}

// ring ends a wait, or the next one.
func (w *waiter) ring() {
	_, _ = unix.Write(w.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // full is rung too
}

func (w *waiter) expired() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.deadline.IsZero() && !time.Now().Before(w.deadline)
}

// wait waits for events of fd, for the time until, or for the bell; the caller
// looks again what is the case.
func (w *waiter) wait(fd int, events int16, until time.Time) error {
	if w.expired() {
		return os.ErrDeadlineExceeded
	}
	w.mu.Lock()
	if d := w.deadline; !d.IsZero() && (until.IsZero() || d.Before(until)) {
		until = d
	}
	w.mu.Unlock()
	timeout := -1
	if !until.IsZero() {
		timeout = max(0, int((time.Until(until)+time.Millisecond-1)/time.Millisecond))
	}
	fds := []unix.PollFd{{Fd: int32(w.bell), Events: unix.POLLIN}, {Fd: int32(fd), Events: events}}
	if _, err := unix.Poll(fds, timeout); err != nil && !errors.Is(err, unix.EINTR) {
		return os.NewSyscallError("poll", err)
	}
	if fds[0].Revents != 0 {
		var b [8]byte
		_, _ = unix.Read(w.bell, b[:])
	}
	if w.expired() {
		return os.ErrDeadlineExceeded
	}
	return nil
}
