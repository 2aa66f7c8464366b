//go:build linux

package agent

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

func owner(fi fs.FileInfo) uint32 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return 0
}

// mountTmpfs mounts a memory file system with the mode and owner of the folder
// it covers.
func mountTmpfs(p string) error {
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
