package tarstream

import (
	"io"
	"os"
	"unsafe"
)

// Going past the page cache pays from directSize on, in bytes: an emulated CPU
// spends 30 µs on each page that it adds to the cache, five times as much as
// on moving it between memory and disk. Smaller files are likely to be used
// again soon and are better kept there.
const directSize = 4 << 20

// directUnit is what offset, length and address must be multiples of, for any
// disk.
const directUnit = 4 << 10

// directChunk is the size of the buffer that is handed to the disk at once, and
// that one write hands on. Each costs a guest several wake-ups of threads,
// which an emulated CPU feels more than the bytes: a copy takes a fifth less of
// all CPUs' time than in pieces of 1 MiB. Of larger ones other calls over the
// same link would have to wait too long.
const directChunk = 2 << 20

// alignedBuffer is of a size and place that go past the page cache.
func alignedBuffer(size int) []byte {
	b := make([]byte, size+directUnit)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (directUnit - 1)
	return b[skip : skip+size : skip+size]
}

func aligned(p []byte, off int64) bool {
	return len(p) > 0 && off%directUnit == 0 && len(p)%directUnit == 0 &&
		uintptr(unsafe.Pointer(unsafe.SliceData(p)))%directUnit == 0
}

// directFile is a file of which whole units at whole offsets go past the page
// cache, as long as the file system lets them.
type directFile struct {
	*os.File
	// able is false once the file system has refused; on is the mode now.
	able, on bool
}

func newDirectFile(f *os.File, size int64, want bool) *directFile {
	return &directFile{File: f, able: want && size >= directSize}
}

// mode makes the next call direct or not; false means that it will not be.
func (f *directFile) mode(direct bool) bool {
	direct = direct && f.able
	if direct == f.on {
		return direct
	}
	if !setDirect(f.File, direct) {
		f.able = false
		return false
	}
	f.on = direct
	return direct
}

// WriteAt writes the whole units of p past the page cache and the rest through it.
func (f *directFile) WriteAt(p []byte, off int64) (int, error) {
	whole := len(p) &^ (directUnit - 1)
	n := 0
	if aligned(p[:whole], off) && f.mode(true) {
		m, err := f.File.WriteAt(p[:whole], off)
		n = m
		switch {
		case err != nil && refusedDirect(err):
			f.able = false
		case err != nil:
			return n, err
		}
	}
	if n == len(p) {
		return n, nil
	}
	f.mode(false)
	m, err := f.File.WriteAt(p[n:], off+int64(n))
	return n + m, err
}

// ReadAt takes what the page cache has from there, and reads whole units that
// it does not have past it.
func (f *directFile) ReadAt(p []byte, off int64) (int, error) {
	if !f.able {
		return f.File.ReadAt(p, off)
	}
	f.mode(false)
	n := readCached(f.File, p, off)
	if n == len(p) {
		return n, nil
	}
	// What the cache gave ends at a page, but for the file's end.
	whole := (len(p) - n) &^ (directUnit - 1)
	if aligned(p[n:n+whole], off+int64(n)) && f.mode(true) {
		m, err := f.File.ReadAt(p[n:n+whole], off+int64(n))
		n += m
		switch {
		case err == io.EOF: // it ends within the last unit
			return n, err
		case err != nil && refusedDirect(err):
			f.able = false
		case err != nil:
			return n, err
		}
	}
	if n == len(p) {
		return n, nil
	}
	f.mode(false)
	m, err := f.File.ReadAt(p[n:], off+int64(n))
	return n + m, err
}
