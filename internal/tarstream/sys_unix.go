//go:build unix

package tarstream

import (
	"archive/tar"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

type fileID struct{ dev, ino uint64 }

// linkID identifies a file; several tells whether it has more than one name.
func linkID(fi fs.FileInfo) (id fileID, several bool) {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return fileID{}, false
	}
	return fileID{uint64(st.Dev), st.Ino}, st.Nlink > 1
}

// fillSystem adds owner and device numbers.
func fillSystem(h *tar.Header, fi fs.FileInfo) {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return
	}
	h.Uid, h.Gid = int(st.Uid), int(st.Gid)
	if h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock {
		h.Devmajor = int64(unix.Major(uint64(st.Rdev)))
		h.Devminor = int64(unix.Minor(uint64(st.Rdev)))
	}
}

// openFile opens a regular file for reading; whatever has taken its place is
// neither followed nor waited for.
func openFile(name string) (*os.File, error) {
	return os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
}

// setLinkTimes sets the times of the symbolic link name in root.
func setLinkTimes(root *os.Root, dir, base string, h *tar.Header) error {
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	t, err := unix.TimeToTimespec(h.ModTime)
	if err != nil {
		return err
	}
	return unix.UtimesNanoAt(int(d.Fd()), base, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
}
