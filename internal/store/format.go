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
	frameLength   = 16
	runLength     = 16
	entryLength   = 56
	trailerLength = 80

	maxMemory     = 1 << 40
	maxFrames     = 1 << 20
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
		return fmt.Errorf("a memory of %d bytes is not whole pages of at most 1 TiB", h.memoryBytes)
	}
	return nil
}

func validID(id string) bool {
	return len(id) == idLength && strings.Trim(id, "0123456789abcdef") == ""
}

// entry is one of the index.
type entry struct {
	offset     int64
	first, end int64
	digest     [sha256.Size]byte
}

func (e entry) encode(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(b, uint64(e.offset))
	b = le.AppendUint64(b, uint64(e.first))
	b = le.AppendUint64(b, uint64(e.end))
	return append(b, e.digest[:]...)
}

// parseIndex reads the index of frames that end at offset end.
func parseIndex(b []byte, pages, end int64) ([]entry, error) {
	entries := make([]entry, len(b)/entryLength)
	le := binary.LittleEndian
	offset, page := uint64(headerLength), uint64(0)
	for i := range entries {
		at, first, last := le.Uint64(b), le.Uint64(b[8:]), le.Uint64(b[16:])
		switch {
		case i == 0 && at != offset, i > 0 && at < offset+frameLength+runLength, at > uint64(end):
			return nil, fmt.Errorf("frame %d: it begins at %d", i, at)
		case first < page, last <= first, last > uint64(pages):
			return nil, fmt.Errorf("frame %d: it has the pages %d to %d", i, first, last)
		}
		entries[i] = entry{offset: int64(at), first: int64(first), end: int64(last), digest: [sha256.Size]byte(b[24:entryLength])}
		offset, page, b = at, last, b[entryLength:]
	}
	if n := len(entries); n == 0 && end != headerLength || n > 0 && uint64(end) < offset+frameLength+runLength {
		return nil, fmt.Errorf("its frames end at %d", end)
	}
	return entries, nil
}

// trailer is the end of a file.
type trailer struct {
	indexOffset          int64
	frames               int64
	dataPages, zeroPages int64
}

// encode gives the trailer without the digest.
func (t trailer) encode() []byte {
	b := make([]byte, 0, trailerLength)
	b = append(b, endMagic...)
	for _, n := range []int64{t.indexOffset, t.frames, t.dataPages, t.zeroPages, 0} {
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
	index := size - trailerLength - int64(frames)*entryLength
	if index < headerLength || le.Uint64(b[8:]) != uint64(index) {
		return t, fmt.Errorf("its length is wrong")
	}
	return trailer{indexOffset: index, frames: int64(frames), dataPages: int64(data), zeroPages: int64(zero)}, nil
}

// rootDigest is the one at the end of a file.
func rootDigest(header, index, trailer []byte) Digest {
	h := sha256.New()
	h.Write(header)
	h.Write(index)
	h.Write(trailer)
	return Digest(h.Sum(nil))
}

// run is some neighboring pages of a frame.
type run struct {
	first, count int64
	data         bool
}

// add puts pages at the end of ascending runs.
func add(runs []run, r run) []run {
	if n := len(runs) - 1; n >= 0 && runs[n].data == r.data && runs[n].first+runs[n].count == r.first {
		runs[n].count += r.count
		return runs
	}
	return append(runs, r)
}

// encodeFrame gives the frame up to its payload.
func encodeFrame(b []byte, runs []run, dataPages, stored int, codec byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint32(b, uint32(len(runs)))
	b = le.AppendUint32(b, uint32(dataPages))
	b = le.AppendUint32(b, uint32(stored))
	b = append(b, codec, 0, 0, 0)
	for _, r := range runs {
		kind := uint32(kindZero)
		if r.data {
			kind = kindData
		}
		b = le.AppendUint64(b, uint64(r.first))
		b = le.AppendUint32(b, uint32(r.count))
		b = le.AppendUint32(b, kind)
	}
	return b
}

// parsedFrame is a frame whose payload is not decoded yet.
type parsedFrame struct {
	runs      []run
	dataPages int
	codec     byte
	payload   []byte
}

// parseFrame reads a whole frame that the index entry is about.
func parseFrame(b []byte, e entry) (f parsedFrame, err error) {
	le := binary.LittleEndian
	if len(b) < frameLength+runLength {
		return f, fmt.Errorf("it is too short")
	}
	runs, pages, stored := le.Uint32(b), le.Uint32(b[4:]), le.Uint32(b[8:])
	f = parsedFrame{dataPages: int(pages), codec: b[12]}
	if b[13]|b[14]|b[15] != 0 || f.codec > codecZstd {
		return f, errdefs.New(errdefs.Incompatible, "it has a field that this program does not know")
	}
	rest := b[frameLength:]
	whole := uint64(pages) * PageSize
	switch {
	case runs == 0 || runs > maxFrameRuns || pages > maxFramePages:
		return f, fmt.Errorf("%d runs with %d pages are too many or none", runs, pages)
	case f.codec == codecNone && uint64(stored) != whole, f.codec == codecZstd && uint64(stored) >= whole:
		return f, fmt.Errorf("a payload of %d bytes does not hold %d pages", stored, pages)
	case uint64(len(rest)) != uint64(runs)*runLength+uint64(stored):
		return f, fmt.Errorf("its length is wrong")
	}
	f.payload = rest[runs*runLength:]
	f.runs, err = parseRuns(rest[:runs*runLength], e, int64(pages))
	return f, err
}

func parseRuns(b []byte, e entry, dataPages int64) ([]run, error) {
	le := binary.LittleEndian
	runs := make([]run, 0, len(b)/runLength)
	next := uint64(e.first)
	for ; len(b) > 0; b = b[runLength:] {
		first, count, kind := le.Uint64(b), le.Uint32(b[8:]), le.Uint32(b[12:])
		switch {
		case kind > kindData:
			return nil, errdefs.New(errdefs.Incompatible, "it has a run of a kind that this program does not know")
		case first < next, len(runs) == 0 && first != next, count == 0, first > uint64(e.end), uint64(count) > uint64(e.end)-first:
			return nil, fmt.Errorf("its run of %d pages from %d is out of order", count, first)
		}
		next = first + uint64(count)
		runs = append(runs, run{first: int64(first), count: int64(count), data: kind == kindData})
		if kind == kindData {
			dataPages -= int64(count)
		}
	}
	if next != uint64(e.end) || dataPages != 0 {
		return nil, fmt.Errorf("its runs do not have the pages that it says")
	}
	return runs, nil
}
