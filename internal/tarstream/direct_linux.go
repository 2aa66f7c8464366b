package tarstream

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// setDirect makes what f reads and writes go past the page cache, or through
// it again. It reports whether the file system can do so.
func setDirect(f *os.File, on bool) bool {
	done := false
	err := control(f, func(fd int) error {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if err != nil {
			return err
		}
		flags &^= unix.O_DIRECT
		if on {
			flags |= unix.O_DIRECT
		}
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags)
		done = err == nil
		return err
	})
	return err == nil && done
}

// readCached reads what of p the page cache has, without any waiting for the
// disk. It returns 0 when that is nothing, and where the system cannot tell.
func readCached(f *os.File, p []byte, off int64) int {
	n := 0
	_ = control(f, func(fd int) (err error) {
		n, err = unix.Preadv2(fd, [][]byte{p}, off, unix.RWF_NOWAIT)
		return err
	})
	return max(0, n)
}

func control(f *os.File, do func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = do(int(fd)) })
	return errors.Join(err, inner)
}

// refusedDirect tells an error that says only that the file system cannot do
// this past the page cache.
func refusedDirect(err error) bool { return errors.Is(err, syscall.EINVAL) }
