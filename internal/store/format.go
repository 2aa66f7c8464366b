package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// PageSize is the size of a page in bytes.
const PageSize = 4096

// The numbers of the format; the package comment draws it.
const (
	version     = 1
	headerMagic = "HPMEMORY"
	endMagic    = "HPMEMEND"

	headerLength  = 64
	frameLength   = 48
	runLength     = 16
	sumLength     = 16
	trailerLength = 80

	maxMemory     = 1 << 36
	maxFrames     = 1 << 24
	maxTable      = 512 << 20
	maxFrameRuns  = 4096
	maxFramePages = 256

	codecNone = 0
	codecZstd = 1

	kindZero = 0
	kindData = 1

	idLength = 16
)

// Digest is the SHA-256 that stands for a whole layer.
type Digest [sha256.Size]byte

// String is the digest as "sha256:" and hexadecimal digits.
func (d Digest) String() string { return fmt.Sprintf("sha256:%x", d[:]) }

// header is the beginning of a file.
type header struct {
	id, parent  string
	memoryBytes int64
}

func (h header) encode() []byte {
	b := make([]byte, headerLength)
	copy(b, headerMagic)
	le := binary.LittleEndian
	le.PutUint32(b[8:], version)
	le.PutUint32(b[12:], PageSize)
	le.PutUint64(b[16:], uint64(h.memoryBytes))
	copy(b[24:40], h.id)
	copy(b[40:56], h.parent)
	return b
}

func parseHeader(b []byte) (h header, err error) {
	le := binary.LittleEndian
	switch {
	case string(b[:8]) != headerMagic:
		return h, fmt.Errorf("it is no memory layer")
	case le.Uint32(b[8:]) != version:
		return h, errdefs.New(errdefs.Incompatible, "its format has version %d, this program reads %d", le.Uint32(b[8:]), version)
	case le.Uint32(b[12:]) != PageSize:
		return h, errdefs.New(errdefs.Incompatible, "its pages have %d bytes, this program reads %d", le.Uint32(b[12:]), PageSize)
	case le.Uint64(b[56:]) != 0:
		return h, errdefs.New(errdefs.Incompatible, "its header has a field that this program does not know")
	}
	size := le.Uint64(b[16:])
	if size > maxMemory {
		return h, fmt.Errorf("a memory of %d bytes is too large", size)
	}
	h = header{id: string(b[24:40]), memoryBytes: int64(size)}
	if parent := b[40:56]; !bytes.Equal(parent, make([]byte, idLength)) {
		h.parent = string(parent)
	}
	return h, h.check()
}

func (h header) check() error {
	switch {
	case !validID(h.id):
		return fmt.Errorf("%q is no layer id", h.id)
	case h.parent != "" && !validID(h.parent) || h.parent == h.id:
		return fmt.Errorf("%q is no id of a layer below", h.parent)
	case h.memoryBytes <= 0 || h.memoryBytes%PageSize != 0 || h.memoryBytes > maxMemory:
		return fmt.Errorf("a memory of %d bytes is not whole pages of at most 64 GiB", h.memoryBytes)
	}
	return nil
}

func validID(id string) bool {
	return len(id) == idLength && strings.Trim(id, "0123456789abcdef") == ""
}

// trailer is the end of a file.
type trailer struct {
	tableOffset          int64
	frames               int64
	dataPages, zeroPages int64
}

// encode gives the trailer without the digest.
func (t trailer) encode() []byte {
	b := make([]byte, 0, trailerLength)
	b = append(b, endMagic...)
	for _, n := range []int64{t.tableOffset, t.frames, t.dataPages, t.zeroPages, 0} {
		b = binary.LittleEndian.AppendUint64(b, uint64(n))
	}
	return b
}

// parseTrailer reads the trailer of a file of so many bytes.
func parseTrailer(b []byte, size int64) (t trailer, err error) {
	le := binary.LittleEndian
	if string(b[:8]) != endMagic {
		return t, fmt.Errorf("its end is missing")
	}
	if le.Uint64(b[40:]) != 0 {
		return t, errdefs.New(errdefs.Incompatible, "its trailer has a field that this program does not know")
	}
	frames := le.Uint64(b[16:])
	if frames > maxFrames {
		return t, fmt.Errorf("%d frames are too many", frames)
	}
	const most = maxMemory / PageSize
	data, zero := le.Uint64(b[24:]), le.Uint64(b[32:])
	if data > most || zero > most {
		return t, fmt.Errorf("%d and %d pages are too many", data, zero)
	}
	table := le.Uint64(b[8:])
	if table < headerLength || table > uint64(size-trailerLength) || size-trailerLength-int64(table) > maxTable {
		return t, fmt.Errorf("its table is not at %d", table)
	}
	return trailer{tableOffset: int64(table), frames: int64(frames), dataPages: int64(data), zeroPages: int64(zero)}, nil
}

// rootDigest is the one at the end of a file.
func rootDigest(header, table, trailer []byte) Digest {
	h := sha256.New()
	h.Write(header)
	h.Write(table)
	h.Write(trailer)
	return Digest(h.Sum(nil))
}

// run is some neighboring pages of a frame.
type run struct {
	first, count int64
	data         bool
}

func (r run) end() int64 { return r.first + r.count }

// add puts pages at the end of ascending runs.
func add(runs []run, r run) []run {
	if n := len(runs) - 1; n >= 0 && runs[n].data == r.data && runs[n].end() == r.first {
		runs[n].count += r.count
		return runs
	}
	return append(runs, r)
}

// sum is what the table has of one page with data.
type sum [sumLength]byte

func sumOf(page []byte) sum {
	d := sha256.Sum256(page)
	return sum(d[:sumLength])
}

// frame is one entry of the table.
type frame struct {
	// offset and stored are where its payload is.
	offset int64
	stored int
	codec  uint32
	digest [sha256.Size]byte
	runs   []run
	sums   []sum
}

func (f *frame) end() int64 { return f.runs[len(f.runs)-1].end() }

func (f *frame) encode(b []byte) []byte {
	le := binary.LittleEndian
	for _, n := range []uint32{uint32(f.stored), f.codec, uint32(len(f.runs)), uint32(len(f.sums))} {
		b = le.AppendUint32(b, n)
	}
	b = append(b, f.digest[:]...)
	for _, r := range f.runs {
		kind := uint32(kindZero)
		if r.data {
			kind = kindData
		}
		b = le.AppendUint64(b, uint64(r.first))
		b = le.AppendUint32(b, uint32(r.count))
		b = le.AppendUint32(b, kind)
	}
	for _, s := range f.sums {
		b = append(b, s[:]...)
	}
	return b
}

// parseTable reads the table of a memory of so many pages.
func parseTable(b []byte, t trailer, pages int64) ([]frame, error) {
	if t.frames > int64(len(b)/frameLength) {
		return nil, fmt.Errorf("its table is too short")
	}
	frames := make([]frame, t.frames)
	offset, page := int64(headerLength), int64(0)
	var data, zero int64
	for i := range frames {
		f := &frames[i]
		rest, err := f.parse(b, page, pages)
		if err != nil {
			return nil, fmt.Errorf("frame %d: %w", i, err)
		}
		b, page = rest, f.end()
		f.offset = offset
		offset += int64(f.stored)
		data += int64(len(f.sums))
		for _, r := range f.runs {
			if !r.data {
				zero += r.count
			}
		}
	}
	switch {
	case len(b) > 0:
		return nil, fmt.Errorf("its table is too long")
	case offset != t.tableOffset:
		return nil, fmt.Errorf("its payloads end at %d, not %d", offset, t.tableOffset)
	case data != t.dataPages || zero != t.zeroPages:
		return nil, fmt.Errorf("it has %d pages and %d zero ones, not %d and %d", data, zero, t.dataPages, t.zeroPages)
	}
	return frames, nil
}

// parse reads the frame at the beginning of b, whose pages are from first on
// and before end, and returns the rest.
func (f *frame) parse(b []byte, first, end int64) ([]byte, error) {
	le := binary.LittleEndian
	if len(b) < frameLength {
		return nil, fmt.Errorf("the table ends in it")
	}
	stored, codec, runs, sums := le.Uint32(b), le.Uint32(b[4:]), le.Uint32(b[8:]), le.Uint32(b[12:])
	whole := uint64(sums) * PageSize
	switch {
	case codec > codecZstd:
		return nil, errdefs.New(errdefs.Incompatible, "it has a codec that this program does not know")
	case runs == 0 || runs > maxFrameRuns || sums > maxFramePages:
		return nil, fmt.Errorf("%d runs with %d pages are too many or none", runs, sums)
	case codec == codecNone && uint64(stored) != whole, codec == codecZstd && uint64(stored) >= whole:
		return nil, fmt.Errorf("a payload of %d bytes does not hold %d pages", stored, sums)
	}
	f.stored, f.codec = int(stored), codec
	f.digest = [sha256.Size]byte(b[16:])
	b = b[frameLength:]
	if len(b) < int(runs*runLength+sums*sumLength) {
		return nil, fmt.Errorf("the table ends in it")
	}
	err := f.parseRuns(b[:runs*runLength], first, end, int64(sums))
	b = b[runs*runLength:]
	f.sums = make([]sum, sums)
	for i := range f.sums {
		f.sums[i] = sum(b[i*sumLength:])
	}
	return b[sums*sumLength:], err
}

func (f *frame) parseRuns(b []byte, next, end, dataPages int64) error {
	le := binary.LittleEndian
	f.runs = make([]run, 0, len(b)/runLength)
	for ; len(b) > 0; b = b[runLength:] {
		first, count, kind := le.Uint64(b), int64(le.Uint32(b[8:])), le.Uint32(b[12:])
		switch {
		case kind > kindData:
			return errdefs.New(errdefs.Incompatible, "it has a run of a kind that this program does not know")
		case first < uint64(next), first >= uint64(end), count == 0, count > end-int64(first):
			return fmt.Errorf("its run of %d pages from %d is out of order", count, first)
		}
		r := run{first: int64(first), count: count, data: kind == kindData}
		f.runs = append(f.runs, r)
		next = r.end()
		if r.data {
			dataPages -= count
		}
	}
	if dataPages != 0 {
		return fmt.Errorf("its runs do not have the pages that it says")
	}
	return nil
}

// find says whether the page is one of the frame's and, with data, which of
// the payload's pages it is; -1 for a zero page.
func (f *frame) find(page int64) (at int64, found bool) {
	for _, r := range f.runs {
		switch {
		case page < r.first:
			return 0, false
		case page < r.end() && r.data:
			return at + page - r.first, true
		case page < r.end():
			return -1, true
		case r.data:
			at += r.count
		}
	}
	return 0, false
}
