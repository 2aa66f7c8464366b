package home

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Unfit says why the home's file system cannot hold it, and what to do; why is ""
// where it can, or where that is not known. One in memory loses all at a reboot,
// and when it is full a machine dies at its next write, by SIGBUS, instead of
// waiting for room.
func (h *Home) Unfit() (why, fix string) {
	for _, dir := range []string{h.dir, h.Layers(), h.MemoryFiles()} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) != nil {
			continue // it is made later
		}
		if name := inMemory(int64(st.Type)); name != "" {
			return fmt.Sprintf("%s is on %s, which is in memory: when it is full machines die, and all of them are lost at a reboot", dir, name),
				"set HOLDPOINT_HOME to a folder on a disk"
		}
	}
	return "", ""
}

// inMemory is the name of a file system in memory, by its number (statfs(2)).
func inMemory(kind int64) string {
	switch kind {
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.RAMFS_MAGIC:
		return "ramfs"
	case unix.HUGETLBFS_MAGIC:
		return "hugetlbfs"
	}
	return ""
}
