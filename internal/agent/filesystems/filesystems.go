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
	mounts, err := readMounts()
	if err != nil {
		return err
	}
	var readOnly []string
	for _, m := range slices.Backward(mounts) {
		if m.point == "/" || !m.disk {
			continue
		}
		if unix.Unmount(m.point, 0) == nil {
			continue
		}
		if err := remount(m.point, true); err != nil {
			undoReadOnly(readOnly)
			return errdefs.New(errdefs.Storage, "make %s read-only: %w", m.point, err)
		}
		readOnly = append(readOnly, m.point)
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

type mount struct {
	point string
	// disk is whether what is written to it ends in a block device.
	disk bool
}

// readMounts reads /proc/self/mountinfo, see proc(5), in the order of mounting.
func readMounts() ([]mount, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	var out []mount
	for line := range strings.Lines(string(b)) {
		before, after, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 6 || len(g) < 2 {
			continue
		}
		out = append(out, mount{
			point: unescape(f[4]),
			// A stacked file system, overlay or FUSE, holds files open below.
			disk: strings.HasPrefix(g[1], "/dev/") || g[0] == "overlay" || strings.HasPrefix(g[0], "fuse"),
		})
	}
	return out, nil
}

// unescape takes back the octal escapes of blanks in mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// swapOff lets go of swap files, which lie on the file systems.
func swapOff() {
	b, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return // a kernel without swap
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 && strings.HasPrefix(f[0], "/") {
			if p, err := unix.BytePtrFromString(unescape(f[0])); err == nil {
				_, _, _ = unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(p)), 0, 0) // if it stays, the remount says so
			}
		}
	}
}
