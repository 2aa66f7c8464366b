package tarstream

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	sizeRecord   = "HOLDPOINT.size"
	sparseRecord = "HOLDPOINT.sparse"
	// maxPieces keeps the record well below the 1 MiB that archive/tar reads
	// of a header.
	maxPieces = 20_000
	// block is the unit in which zeros become holes.
	block = 4 << 10
)

// piece is a run of data in a file.
type piece struct{ off, len int64 }

// joined merges pieces until there are few enough, small holes first.
func joined(pieces []piece) []piece {
	for hole := int64(64 << 10); len(pieces) > maxPieces; hole *= 2 {
		out := pieces[:1]
		for _, d := range pieces[1:] {
			last := &out[len(out)-1]
			if d.off-(last.off+last.len) <= hole {
				last.len = d.off + d.len - last.off
			} else {
				out = append(out, d)
			}
		}
		pieces = out
	}
	return pieces
}

// describe notes in h that only pieces of the file follow.
func describe(h *tar.Header, pieces []piece) {
	if len(pieces) == 1 && pieces[0] == (piece{0, h.Size}) {
		return
	}
	var b strings.Builder
	total := int64(0)
	for i, d := range pieces {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(d.off, 10) + "," + strconv.FormatInt(d.len, 10))
		total += d.len
	}
	if len(pieces) == 0 {
		b.WriteString("0,0") // pax has no empty values
	}
	h.PAXRecords = map[string]string{
		sizeRecord:   strconv.FormatInt(h.Size, 10),
		sparseRecord: b.String(),
	}
	h.Size = total
}

// described reads what describe wrote. The pieces are in order, do not
// overlap, lie within size and add up to the content.
func described(h *tar.Header) (pieces []piece, size int64, err error) {
	record, ok := h.PAXRecords[sparseRecord]
	if !ok {
		return []piece{{0, h.Size}}, h.Size, nil
	}
	bad := errdefs.New(errdefs.Invalid, "archive entry %q: its map of holes is wrong", h.Name)
	size, err = strconv.ParseInt(h.PAXRecords[sizeRecord], 10, 64)
	fields := strings.Split(record, ",")
	if err != nil || size < 0 || len(fields)%2 != 0 || len(fields) > 2*maxPieces {
		return nil, 0, bad
	}
	end, total := int64(0), int64(0)
	for i := 0; i < len(fields); i += 2 {
		off, err1 := strconv.ParseInt(fields[i], 10, 64)
		n, err2 := strconv.ParseInt(fields[i+1], 10, 64)
		if err1 != nil || err2 != nil || off < end || n < 0 || off > size || n > size-off {
			return nil, 0, bad
		}
		pieces = append(pieces, piece{off, n})
		end = off + n
		total += n
	}
	if total != h.Size {
		return nil, 0, bad
	}
	return pieces, size, nil
}

// writePieces writes the content r of an entry to the empty file f. Blocks of
// zeros become holes. What was read into one buffer is written while the next
// is filled; both are equally long.
func writePieces(ctx context.Context, f *directFile, r io.Reader, pieces []piece, size int64, buf, next []byte) (err error) {
	var write beside
	defer write.end(&err)
	for _, d := range pieces {
		for off, end := d.off, d.off+d.len; off < end; {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			// The first read ends at a multiple of the buffer, so that blocks
			// are where the file system has them.
			n := min(end-off, int64(len(buf))-off%int64(len(buf)))
			if _, err := io.ReadFull(r, buf[:n]); err != nil {
				return err
			}
			if err := write.wait(); err != nil {
				return err
			}
			full, at := buf[:n], off
			off += n
			if off == size { // the last: nothing is read meanwhile
				if err := writeSparse(f, full, at); err != nil {
					return err
				}
				continue
			}
			write.begin(func() error { return writeSparse(f, full, at) })
			buf, next = next, buf
		}
	}
	if err := write.wait(); err != nil {
		return err
	}
	return f.Truncate(size)
}

// writeSparse writes what is not zero in p, which belongs at off.
func writeSparse(f io.WriterAt, p []byte, off int64) error {
	var zeros [block]byte
	start := 0 // of the run of data that ends at i
	for i := 0; i < len(p); {
		n := min(len(p)-i, block-int((off+int64(i))%block))
		if bytes.Equal(p[i:i+n], zeros[:n]) {
			if start < i {
				if _, err := f.WriteAt(p[start:i], off+int64(start)); err != nil {
					return err
				}
			}
			start = i + n
		}
		i += n
	}
	if start < len(p) {
		_, err := f.WriteAt(p[start:], off+int64(start))
		return err
	}
	return nil
}
