//go:build linux

package monitor

import (
	"bytes"
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

// Holder gives the process that holds the lock of the folder dir; 0: none that
// this user can see. The kernel does not name the holder of such a lock, but
// shows in its list of open files (proc(5), fdinfo) which one it is.
func Holder(dir string) (int, error) {
	want, err := os.Stat(filepath.Join(dir, lockFile))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, errdefs.New(errdefs.Storage, "look for holder of lock: %w", err)
	}
	procs, err := filepath.Glob("/proc/[0-9]*/fd")
	if err != nil {
		return 0, err
	}
	for _, fds := range procs {
		proc := filepath.Dir(fds)
		pid, err := strconv.Atoi(filepath.Base(proc))
		if err != nil || pid == os.Getpid() {
			continue
		}
		entries, _ := os.ReadDir(fds) // gone, or not ours
		for _, e := range entries {
			got, err := os.Stat(filepath.Join(fds, e.Name()))
			if err != nil || !os.SameFile(got, want) {
				continue
			}
			info, err := os.ReadFile(filepath.Join(proc, "fdinfo", e.Name()))
			if err == nil && bytes.Contains(info, []byte("\nlock:")) {
				return pid, nil
			}
		}
	}
	return 0, nil
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
