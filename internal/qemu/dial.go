//go:build linux

package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// dialSlice is how long one connect may wait in the kernel before ctx is
// looked at again.
const dialSlice = 100 * time.Millisecond

// dial connects to a socket of QEMU's. QEMU queues one connection beside the
// one it serves; to a socket whose queue is full the kernel lets only a blocking
// connect wait, and net's is not.
func dial(ctx context.Context, path string) (*net.UnixConn, error) {
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
