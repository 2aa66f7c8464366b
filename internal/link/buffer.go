package link

import "io"

// The sizes of a Buffer, in bytes.
const (
	leastBuffer = 4 << 10
	mostBuffer  = 256 << 10
)

// Buffer reads in pieces as large as they come, of up to 256 KiB. It is small
// until they fill it: most commands and requests say little, and memory that a
// guest allocates it has to zero, and the next checkpoint to keep. Its zero value
// is ready.
type Buffer struct {
	buf  []byte
	full bool
}

// Read reads once from r. What it returns is valid until the next Read.
func (b *Buffer) Read(r io.Reader) ([]byte, error) {
	if b.buf == nil || b.full && len(b.buf) < mostBuffer {
		b.buf = make([]byte, min(max(8*len(b.buf), leastBuffer), mostBuffer))
	}
	n, err := r.Read(b.buf)
	b.full = n == len(b.buf)
	return b.buf[:n], err
}
