//go:build linux

// Package filesystems mounts memory file systems in a guest and makes all of
// its file systems clean before its end. It stops nobody who uses them.
package filesystems

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent/mounts"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// MountTmpfs mounts a memory file system with the mode and owner of the folder
// it covers.
func MountTmpfs(p string) error {
	if err := os.MkdirAll(p, 0o755); err != nil {
		return fmt.Errorf("mount tmpfs %q: %w", p, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		return fmt.Errorf("mount tmpfs %q: %w", p, err)
	}
	opts := fmt.Sprintf("mode=%o,uid=%d,gid=%d", st.Mode&0o7777, st.Uid, st.Gid)
	if err := unix.Mount("tmpfs", p, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, opts); err != nil {
		return fmt.Errorf("mount tmpfs %q: %w", p, err)
	}
	return nil
}

// Clean unmounts what can be and makes the rest read-only, the last
// mounted first. Only file systems on devices matter, the others are memory.
func Clean() error {
	swapOff()
	unix.Sync()
	list, err := mounts.List()
	if err != nil {
		return err
	}
	var readOnly []string
	for _, m := range slices.Backward(list) {
		// A stacked file system, overlay or FUSE, holds files open below.
		stacked := m.Type == "overlay" || strings.HasPrefix(m.Type, "fuse")
		if m.Point == "/" || !m.OnDevice() && !stacked {
			continue
		}
		if unix.Unmount(m.Point, 0) == nil {
			continue
		}
		if err := remount(m.Point, true); err != nil {
			undoReadOnly(readOnly)
			return errdefs.New(errdefs.Storage, "make %s read-only: %w", m.Point, err)
		}
		readOnly = append(readOnly, m.Point)
	}
	if err := remount("/", true); err != nil {
		undoReadOnly(readOnly)
		return errdefs.New(errdefs.Storage, "make / read-only: %w", err)
	}
	unix.Sync()
	return nil
}

func undoReadOnly(points []string) {
	for _, p := range points {
		_ = remount(p, false) // as well as can be: it is an error already
	}
}

func remount(point string, readOnly bool) error {
	flags := uintptr(unix.MS_REMOUNT)
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	return unix.Mount("", point, "", flags, "")
}

// swapOff lets go of swap files, which lie on the file systems.
func swapOff() {
	b, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return // a kernel without swap
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 && strings.HasPrefix(f[0], "/") {
			if p, err := unix.BytePtrFromString(mounts.Unescape(f[0])); err == nil {
				_, _, _ = unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(p)), 0, 0) // if it stays, the remount says so
			}
		}
	}
}
