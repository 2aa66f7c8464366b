//go:build linux

package host

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Bind makes a QEMU that cmd is to start, and that is no machine, end with this
// process, whatever ends that: with nobody at its QMP socket it would stay. The
// kernel ties it to the thread that starts it (prctl(2), PR_SET_PDEATHSIG):
// release lets go of that thread, after Wait and in the same goroutine.
func Bind(cmd *exec.Cmd) (release func()) {
	runtime.LockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return runtime.UnlockOSThread
}

// SocketPair makes the sockets of a QMP connection to a process that is to
// inherit one: our end as a connection and the other as a file, to be closed
// once it is started.
func SocketPair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "qmp"), os.NewFile(uintptr(fds[1]), "qmp")
	conn, err := net.FileConn(ours)
	_ = ours.Close() // conn is a duplicate
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make socket pair: %w", err), theirs.Close())
	}
	return conn.(*net.UnixConn), theirs, nil
}
