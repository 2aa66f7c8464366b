// Package whole reads tar archives that have to be whole: to archive/tar the end
// of the stream between two entries is the end of the archive, too. It says
// nothing of what is in them.
package whole

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
)

// block is what tar divides an archive into, in bytes. At least one of zeros
// marks its end.
const block = 512

// What Reader.Next says of streams that end before an archive does.
var (
	ErrEmpty  = errors.New("the archive is empty")
	ErrNoMark = errors.New("the archive is cut off: its end mark is missing")
)

// Reader reads one archive.
type Reader struct {
	*tar.Reader
	in *tailed
}

// NewReader reads the archive r.
func NewReader(r io.Reader) *Reader {
	in := &tailed{r: r}
	return &Reader{tar.NewReader(in), in}
}

// Next is that of tar.Reader, but that io.EOF is a whole archive's. The entry
// before has to be read to its end.
func (r *Reader) Next() (*tar.Header, error) {
	padded := (r.in.read + block - 1) / block * block // where it ends
	h, err := r.Reader.Next()
	switch {
	case !errors.Is(err, io.EOF):
		return h, err
	case r.in.read == 0:
		return nil, ErrEmpty
	case r.in.read < padded+block || r.in.zeros < block:
		return nil, ErrNoMark
	}
	return nil, err
}

// tailed knows how much was read of a stream and how it ended.
type tailed struct {
	r io.Reader
	// zeros are the zero bytes it ended with, of which a block is enough.
	read, zeros int64
}

// Read implements io.Reader.
func (t *tailed) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	tail := p[max(0, n-block):n]
	zeros := len(tail) - len(bytes.TrimRight(tail, "\x00"))
	if zeros < n {
		t.zeros = 0
	}
	t.zeros += int64(zeros)
	t.read += int64(n)
	return n, err
}
