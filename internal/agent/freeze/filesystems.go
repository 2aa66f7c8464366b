//go:build linux

package freeze

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent/mounts"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// The requests of ioctl_fs(2) that package unix does not name.
const (
	requestFreeze = 0xc0045877 // FIFREEZE
	requestThaw   = 0xc0045878 // FITHAW
)

// Mounted opens the file systems that end in a block device, each once, in the
// order of mounting.
func Mounted() ([]FileSystem, error) {
	list, err := mounts.List()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	var found []FileSystem
	for _, mount := range list {
		if !mount.OnDevice() || mount.ReadOnly || seen[mount.Device] {
			continue
		}
		m, err := open(mount.Point)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
			continue // mounted over, or not for us: another mount of it may do
		}
		if err != nil {
			return nil, errors.Join(errdefs.New(errdefs.Storage, "open %s: %w", mount.Point, err), closeAll(found))
		}
		seen[mount.Device] = true
		found = append(found, m)
	}
	return found, nil
}

func closeAll(all []FileSystem) (err error) {
	for _, fs := range all {
		err = errors.Join(err, fs.Close())
	}
	return err
}

// mounted is a file system that is held open by where it is mounted.
type mounted struct{ *os.File }

func open(point string) (mounted, error) {
	f, err := os.OpenFile(point, os.O_RDONLY|unix.O_NOATIME|unix.O_NONBLOCK, 0)
	return mounted{f}, err
}

func (m mounted) Sync() error { return unix.Syncfs(int(m.Fd())) }

func (m mounted) Freeze() error {
	err := ioctl(m.File, requestFreeze)
	switch {
	case err == unix.EBUSY:
		return errdefs.New(errdefs.WrongState, "%s is frozen already; thaw it in the machine: fsfreeze -u %s", m.Name(), m.Name())
	case err == unix.EOPNOTSUPP:
		return errdefs.New(errdefs.Unsupported, "%s has a file system that cannot be frozen; unmount it, or take a stopped checkpoint: --mode stopped", m.Name())
	case err != nil:
		return errdefs.New(errdefs.Storage, "freeze %s: %w", m.Name(), err)
	}
	return nil
}

func (m mounted) Thaw() (wasFrozen bool, err error) {
	err = ioctl(m.File, requestThaw)
	if err == unix.EINVAL {
		return false, nil
	}
	return err == nil, err
}

func ioctl(f *os.File, request uint) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), 0)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}
