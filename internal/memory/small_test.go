package memory

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// small is a folder on a file system of its own of that size.
func small(t *testing.T, size string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("a small file system can only be mounted by root")
	}
	dir, err := os.MkdirTemp("", "memory-")
	must(t, err)
	t.Cleanup(func() { must(t, os.Remove(dir)) })
	if err := unix.Mount("small", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size="+size+",mode=0700"); err != nil {
		t.Skipf("mount a small file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}
