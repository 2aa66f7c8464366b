//go:build linux

package isolation

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// errSpec is in the errors that are the caller's and not the host's.
var errSpec = errors.New("isolate files")

// The rights of Landlock that a path can give.
const (
	readRights   = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	writeRights  = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	folderRights = readRights | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE |
		unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE
	// fileRights are those that a rule about a file may have.
	fileRights = unix.LANDLOCK_ACCESS_FS_EXECUTE | writeRights
)

// handled are the rights that a version of Landlock denies unless a rule gives
// them (landlock(7)); LandlockABI gives the version.
func handled(abi int) *unix.LandlockRulesetAttr {
	a := &unix.LandlockRulesetAttr{Handled_access_fs: unix.LANDLOCK_ACCESS_FS_MAKE_SYM<<1 - 1}
	if abi >= 2 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_REFER
	}
	if abi >= 3 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if abi >= 4 {
		a.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if abi >= 5 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if abi >= 6 {
		a.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	return a
}

// attrSize is how much of the attributes a version knows.
func attrSize(abi int) uintptr {
	switch {
	case abi < 4:
		return unsafe.Offsetof(unix.LandlockRulesetAttr{}.Handled_access_net)
	case abi < 6:
		return unsafe.Offsetof(unix.LandlockRulesetAttr{}.Scoped)
	}
	return unsafe.Offsetof(unix.LandlockRulesetAttr{}.Quiet_access_fs)
}

// LandlockABI is the kernel's version of Landlock.
func LandlockABI() (int, error) {
	v, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	switch errno {
	case 0:
		return int(v), nil
	case unix.ENOSYS:
		return 0, errors.New("this kernel has no Landlock")
	case unix.EOPNOTSUPP:
		return 0, errors.New("this kernel has not turned Landlock on (parameter lsm=)")
	}
	return 0, fmt.Errorf("ask for Landlock: %w", errno)
}

// restrictFiles restricts the thread.
func (s Spec) restrictFiles() (abi int, err error) {
	if abi, err = LandlockABI(); err != nil {
		return 0, err
	}
	attr := handled(abi)
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(attr)), attrSize(abi), 0)
	if errno != 0 {
		return 0, fmt.Errorf("make rules of Landlock: %w", errno)
	}
	rules := os.NewFile(fd, "landlock")
	defer rules.Close()
	for _, r := range []struct {
		paths    []string
		rights   uint64
		optional bool
	}{
		{s.Read, readRights, true},
		{s.Execute, readRights | unix.LANDLOCK_ACCESS_FS_EXECUTE, true},
		{s.Write, writeRights, false},
		{s.Folders, folderRights, false},
	} {
		for _, path := range r.paths {
			err := allow(rules, path, r.rights&attr.Handled_access_fs)
			if err != nil && (!r.optional || !errors.Is(err, os.ErrNotExist)) {
				return 0, errors.Join(errSpec, err)
			}
		}
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, rules.Fd(), 0, 0); errno != 0 {
		return 0, fmt.Errorf("restrict by Landlock: %w", errno)
	}
	return abi, nil
}

func allow(rules *os.File, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= fileRights
	}
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, rules.Fd(), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
	if errno != 0 {
		return fmt.Errorf("allow %q: %w", path, errno)
	}
	return nil
}
