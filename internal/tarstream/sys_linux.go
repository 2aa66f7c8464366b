package tarstream

import (
	"archive/tar"
	"errors"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// mayHaveHoles reports whether less is allocated than the length says.
func mayHaveHoles(fi fs.FileInfo) bool {
	st, ok := fi.Sys().(*syscall.Stat_t)
	return ok && st.Blocks*512 < st.Size
}

// dataPieces asks the file system where the data of f is. One that cannot say
// has one piece.
func dataPieces(f *os.File, size int64) ([]piece, error) {
	var pieces []piece
	fd := int(f.Fd())
	for off := int64(0); off < size; {
		data, err := unix.Seek(fd, off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if errors.Is(err, unix.EINVAL) {
			return []piece{{0, size}}, nil
		}
		if err != nil {
			return nil, os.NewSyscallError("lseek", err)
		}
		hole, err := unix.Seek(fd, data, unix.SEEK_HOLE)
		if err != nil {
			return nil, os.NewSyscallError("lseek", err)
		}
		if data >= size {
			break
		}
		hole = min(hole, size)
		pieces = append(pieces, piece{data, hole - data})
		off = hole
	}
	return joined(pieces), nil
}

// makeSpecial makes a device node or pipe in the folder dir of root.
func makeSpecial(root *os.Root, dir, base string, h *tar.Header) error {
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	mode, dev := uint32(unix.S_IFIFO), 0
	switch h.Typeflag {
	case tar.TypeChar:
		mode = unix.S_IFCHR
	case tar.TypeBlock:
		mode = unix.S_IFBLK
	}
	if h.Typeflag != tar.TypeFifo {
		if h.Devmajor < 0 || h.Devminor < 0 || h.Devmajor > 0xfff || h.Devminor > 0xfffff {
			return unix.EINVAL
		}
		dev = int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))
	}
	return unix.Mknodat(int(d.Fd()), base, mode|uint32(h.Mode&0o777), dev)
}
