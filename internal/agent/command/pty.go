//go:build linux

package command

import (
	"os"

	"golang.org/x/sys/unix"
)

// openPTY returns a new pseudo terminal. The far side is got from the near one
// and not by a name, so that it is right in any mount namespace.
func openPTY(rows, cols uint32) (near, far *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("open /dev/ptmx", err)
	}
	near = os.NewFile(uintptr(fd), "ptmx")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		_ = near.Close()
		return nil, nil, os.NewSyscallError("unlock pty", err)
	}
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		_ = near.Close()
		return nil, nil, os.NewSyscallError("open pty", errno)
	}
	far = os.NewFile(peer, "pts")
	if rows > 0 && cols > 0 {
		_ = resize(near, rows, cols)
	}
	return near, far, nil
}

func resize(f *os.File, rows, cols uint32) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var ierr error
	err = raw.Control(func(fd uintptr) {
		ierr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ,
			&unix.Winsize{Row: uint16(min(rows, 0xffff)), Col: uint16(min(cols, 0xffff))})
	})
	if err == nil {
		err = ierr
	}
	return err
}
