//go:build linux

package monitor

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// TakeLock makes this process the one monitor of dir until the file is closed
// or the process ends. It is a lock of the open file (fcntl(2), "Open file
// description locks"), not flock: Alive can then ask for its holder without
// taking it, so that asking never makes a monitor fail that starts meanwhile.
func TakeLock(dir string) (*os.File, error) {
	path := filepath.Join(dir, lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "open lock %q: %w", path, err)
	}
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lk); err != nil {
		_ = f.Close() // nothing was written
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			return nil, errdefs.New(errdefs.Conflict, "lock %q: another monitor of this run lives", path)
		}
		return nil, errdefs.New(errdefs.Storage, "lock %q: %w", path, err)
	}
	// For people who look for the process; nothing reads it.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return f, nil
}

// Alive reports whether the run's folder dir has a living monitor.
func Alive(dir string) (bool, error) {
	path := filepath.Join(dir, lockFile)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, errdefs.New(errdefs.Storage, "open lock %q: %w", path, err)
	}
	defer f.Close()
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lk); err != nil {
		return false, errdefs.New(errdefs.Storage, "query lock %q: %w", path, err)
	}
	return lk.Type != unix.F_UNLCK, nil
}
