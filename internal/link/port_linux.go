package link

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// goneAfter is how long the port must say that no host is connected before
// that is believed. A host that leaves and comes back at once is reported as
// leaving and coming when the new one may have spoken already.
const goneAfter = 250 * time.Millisecond

// virtioPort is a virtio-serial port. Linux gives at most one page for each
// read of it, takes at most 32 KiB for each write, and reads nothing, at
// once, while no host is connected (drivers/char/virtio_console.c).
type virtioPort struct {
	f *os.File
	// told is whether the reader knows that no host is connected.
	told bool
}

// OpenPort opens the virtio-serial port at path, /dev/vportNpM. The kernel
// lets a port be opened once only at a time.
func OpenPort(path string) (Port, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open agent port: %w", err)
	}
	return &virtioPort{f: f}, nil
}

// Read fills as much of p as is there, waiting for the first byte. It returns
// ErrHostGone once for each time that the host goes.
func (p *virtioPort) Read(b []byte) (int, error) {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var n int
	var rerr error
	grace := false
	err = raw.Read(func(fd uintptr) bool {
		n, rerr = readAll(int(fd), b)
		for errors.Is(rerr, io.EOF) && !hungUp(int(fd)) {
			n, rerr = readAll(int(fd), b) // a host has come meanwhile
		}
		if n > 0 || (rerr != nil && !errors.Is(rerr, io.EOF)) {
			p.told = p.told && n == 0
			return true
		}
		if rerr != nil && !p.told && !grace {
			grace = true
			_ = p.f.SetReadDeadline(time.Now().Add(goneAfter))
		}
		return false
	})
	if grace {
		_ = p.f.SetReadDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return n, rerr
	case grace && errors.Is(err, os.ErrDeadlineExceeded):
		p.told = true
		return 0, ErrHostGone
	}
	return 0, err
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

// hungUp reports whether no host is connected now.
func hungUp(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0 && fds[0].Revents&unix.POLLHUP != 0
}

func (p *virtioPort) Write(b []byte) (int, error)        { return p.f.Write(b) }
func (p *virtioPort) Close() error                       { return p.f.Close() }
func (p *virtioPort) SetReadDeadline(t time.Time) error  { return p.f.SetReadDeadline(t) }
func (p *virtioPort) SetWriteDeadline(t time.Time) error { return p.f.SetWriteDeadline(t) }
