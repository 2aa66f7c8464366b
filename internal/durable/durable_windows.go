package durable

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/windows"
)

const (
	noFollow    = 0
	openForSync = os.O_RDWR // FlushFileBuffers wants write access
	errQuota    = windows.ERROR_DISK_FULL
)

// FreeBytes is what the user may still write to the volume that holds path.
func FreeBytes(path string) (int64, error) {
	p, err := windows.UTF16PtrFromString(path)
	if err != nil {
		return 0, wrap("read free space of", path, err)
	}
	var free uint64
	if err := windows.GetDiskFreeSpaceEx(p, &free, nil, nil); err != nil {
		return 0, wrap("read free space of", path, err)
	}
	return int64(free), nil
}

// syncDir does nothing: NTFS journals names itself.
func syncDir(string) error { return nil }

// lockFile locks one byte far behind the pid, which others may read.
func lockFile(f *os.File) error {
	err := windows.LockFileEx(windows.Handle(f.Fd()),
		windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0,
		&windows.Overlapped{Offset: 1 << 30})
	if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
		return errLocked
	}
	return err
}

func owner(fs.FileInfo) (uid int, known bool) { return 0, false }
