//go:build linux

package process

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// dialSlice is how long one connect may wait in the kernel before ctx is
// looked at again.
const dialSlice = 100 * time.Millisecond

// Dial connects to a socket at path whose listener, as QEMU does, queues one connection beside the
// one it serves; to a socket whose queue is full the kernel lets only a blocking
// connect wait, and net's is not.
func Dial(ctx context.Context, path string) (*net.UnixConn, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("dial %q: %w", path, err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket: %w", err)
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close() // the connection has a duplicate
	slice := unix.NsecToTimeval(dialSlice.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &slice); err != nil {
		return nil, fmt.Errorf("limit connect: %w", err)
	}
	for {
		err := unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		switch {
		case err == nil:
			conn, err := net.FileConn(file)
			if err != nil {
				return nil, fmt.Errorf("dial %q: %w", path, err)
			}
			return conn.(*net.UnixConn), nil
		case ctx.Err() != nil:
			return nil, fmt.Errorf("dial %q: %w", path, ctx.Err())
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR):
			return nil, fmt.Errorf("dial %q: %w", path, err)
		}
	}
}

// DialPeer is Dial where the process pid must be listening; CONFLICT when it
// is another one.
func DialPeer(ctx context.Context, path string, pid int) (*net.UnixConn, error) {
	conn, err := Dial(ctx, path)
	if err != nil {
		return nil, err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	var peer *unix.Ucred
	var perr error
	err = raw.Control(func(fd uintptr) { peer, perr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, perr); err == nil && int(peer.Pid) != pid {
		err = errdefs.New(errdefs.Conflict, "process %d listens where %d should", peer.Pid, pid)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}
