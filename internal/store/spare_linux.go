package store

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// adopt opens a file to be rewritten. Nil unless it is a file of the size that
// nobody else has open or mapped, since only then the kernel gives a lease on it
// for writing, and that can have holes made.
func adopt(path string, size int64) *os.File {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil
	}
	st, err := file.Stat()
	if err == nil && (!st.Mode().IsRegular() || st.Size() != size) {
		err = unix.EINVAL
	}
	for _, kind := range []int{unix.F_WRLCK, unix.F_UNLCK} {
		if err == nil {
			_, err = unix.FcntlInt(file.Fd(), unix.F_SETLEASE, kind)
		}
	}
	if err == nil {
		err = punch(file, size, PageSize) // behind its end: this is to try
	}
	if err != nil {
		_ = file.Close() // nothing was written
		return nil
	}
	return file
}

// leastHole is the least that a hole is made of, in pages: making one may wait
// for the disk, which writing zeros where there is data already does not.
const leastHole = 16

// clear makes zero, and holes where it is worth it, of what the file has where
// the memory has no data.
func (m *materialization) clear(file *os.File) error {
	size := int64(len(m.owners)) * PageSize
	for at := int64(0); at < size; {
		data, err := file.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("find data: %w", err)
		}
		hole, err := file.Seek(data, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("find hole: %w", err)
		}
		// Whatever touches a page counts as all of it.
		end := (min(hole, size) + PageSize - 1) / PageSize
		for p := data / PageSize; p < end; p++ {
			q := p
			for q < end && m.owners[q] <= 0 {
				q++
			}
			if q == p {
				continue
			}
			if q-p >= leastHole {
				err = punch(file, p*PageSize, (q-p)*PageSize)
			} else {
				_, err = file.WriteAt(make([]byte, (q-p)*PageSize), p*PageSize)
			}
			if err != nil {
				return err
			}
			p = q
		}
		at = end * PageSize
	}
	return nil
}

func punch(file *os.File, offset, length int64) error {
	if err := unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, length); err != nil {
		return fmt.Errorf("make a hole: %w", err)
	}
	return nil
}
