package terminal

import (
	"errors"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// NewInput makes an Input of r.
func NewInput(r io.Reader) Input {
	f, ok := r.(*os.File)
	if !ok {
		return plainInput{r}
	}
	wakeR, wakeW, err := os.Pipe()
	if err != nil {
		return plainInput{r}
	}
	return &polledInput{f: f, fd: int(f.Fd()), wakeR: wakeR, wakeW: wakeW, wakeFD: int(wakeR.Fd())}
}

// polledInput waits for input by poll(2), together with a pipe that Stop
// closes: os.File's own deadlines do not work for inherited descriptors.
type polledInput struct {
	f            *os.File
	fd, wakeFD   int
	wakeR, wakeW *os.File
	stop         sync.Once
}

func (p *polledInput) Read(b []byte) (int, error) {
	for {
		fds := []unix.PollFd{
			{Fd: int32(p.fd), Events: unix.POLLIN},
			{Fd: int32(p.wakeFD), Events: unix.POLLIN},
		}
		_, err := unix.Poll(fds, -1)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, os.NewSyscallError("poll", err)
		case fds[1].Revents != 0:
			return 0, io.EOF
		}
		return p.f.Read(b)
	}
}

// Stop closes the writing end only: the other is still polled, and goes with
// its finalizer.
func (p *polledInput) Stop() { p.stop.Do(func() { _ = p.wakeW.Close() }) }
