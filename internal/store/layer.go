package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Info is what a layer says of itself.
type Info struct {
	// ID is the layer's, Parent that of the layer below or empty.
	ID, Parent  string
	MemoryBytes int64
	// DataPages and ZeroPages are in the layer itself.
	DataPages, ZeroPages int64
	// Bytes is the length of the file.
	Bytes  int64
	Digest Digest
}

// Layer is a layer open for reading, by any number of goroutines at once. Its
// life: Open, which checks all but the payloads; each payload is checked when it
// is read; Close.
type Layer struct {
	info   Info
	name   string
	file   *os.File
	frames []frame
	// zstd is for Verify and a View; most layers need none.
	zstd func() (*zstd.Decoder, error)

	mu sync.Mutex
	// recent are decoded payloads, newest last.
	recent []payload
}

type payload struct {
	frame int
	data  []byte
}

// recentPayloads is how many payloads a layer keeps for a View: 4 MiB.
const recentPayloads = 16

// Open opens the layer at path. STORAGE when it is damaged, INCOMPATIBLE when
// it is of another version, NOT_FOUND when it is not there.
func Open(path string) (*Layer, error) {
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errdefs.New(errdefs.NotFound, "open memory layer: %w", err)
	}
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "open memory layer: %w", err)
	}
	l := &Layer{name: path, file: file, zstd: sync.OnceValues(func() (*zstd.Decoder, error) { return newDecoder(workers) })}
	if err := l.read(); err != nil {
		_ = l.Close() // nothing was written
		return nil, l.damaged(err)
	}
	return l, nil
}

// damaged names the layer in an error, which is of kind STORAGE unless it has
// another kind.
func (l *Layer) damaged(err error) error {
	if err == nil || errdefs.KindOf(err) != errdefs.Internal {
		return fmt.Errorf("read memory layer %q: %w", l.name, err)
	}
	return errdefs.New(errdefs.Storage, "memory layer %q is damaged: %w", l.name, err)
}

// read reads the end, the beginning and the table.
func (l *Layer) read() error {
	st, err := l.file.Stat()
	if err != nil {
		return err
	}
	size := st.Size()
	if !st.Mode().IsRegular() || size < headerLength+trailerLength {
		return errors.New("it is no memory layer")
	}
	head, end := make([]byte, headerLength), make([]byte, trailerLength)
	if err := readFull(l.file, head, 0); err != nil {
		return err
	}
	h, err := parseHeader(head)
	if err != nil {
		return err
	}
	if err := readFull(l.file, end, size-trailerLength); err != nil {
		return err
	}
	t, err := parseTrailer(end, size)
	if err != nil {
		return err
	}
	table := make([]byte, size-trailerLength-t.tableOffset)
	if err := readFull(l.file, table, t.tableOffset); err != nil {
		return err
	}
	digest := Digest(end[trailerLength-sha256.Size:])
	if rootDigest(head, table, end[:trailerLength-sha256.Size]) != digest {
		return errors.New("the digest of its table differs")
	}
	if l.frames, err = parseTable(table, t, h.memoryBytes/PageSize); err != nil {
		return err
	}
	l.info = Info{
		ID: h.id, Parent: h.parent, MemoryBytes: h.memoryBytes,
		DataPages: t.dataPages, ZeroPages: t.zeroPages, Bytes: size, Digest: digest,
	}
	return nil
}

// newDecoder makes a decoder of payloads for so many goroutines. It runs none
// of its own, so it need not be closed.
func newDecoder(goroutines int) (*zstd.Decoder, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(goroutines), zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderMaxMemory(maxFramePages*PageSize), zstd.WithDecoderMaxWindow(maxFramePages*PageSize))
	if err != nil {
		return nil, fmt.Errorf("make zstd decoder: %w", err)
	}
	return z, nil
}

// Info is what the layer says of itself.
func (l *Layer) Info() Info { return l.info }

// Close closes the file; nobody may be reading.
func (l *Layer) Close() error { return l.file.Close() }

// decoderSlack is what the zstd decoder wants behind the last block so that it
// may copy without looking for the end (its compressedBlockOverAlloc).
const decoderSlack = 32

// buffers are what load may use again once the data it gave is not needed any
// more: without them, half of the memory that a chain takes is cleared twice.
type buffers struct{ stored, data []byte }

func sized(b *[]byte, size int) []byte {
	if cap(*b) < size {
		*b = make([]byte, size)
	}
	return (*b)[:size]
}

// load reads the payload of frame i, checks it and decodes it, in the buffers.
func (l *Layer) load(i int, z *zstd.Decoder, b *buffers) ([]byte, error) {
	f := &l.frames[i]
	stored := sized(&b.stored, f.stored)
	if err := readFull(l.file, stored, f.offset); err != nil {
		return nil, l.damaged(fmt.Errorf("frame %d: %w", i, err))
	}
	if sha256.Sum256(stored) != f.digest {
		return nil, l.damaged(fmt.Errorf("frame %d at %d: its digest differs", i, f.offset))
	}
	if f.codec == codecNone {
		return stored, nil
	}
	whole := len(f.sums) * PageSize
	data, err := z.DecodeAll(stored, sized(&b.data, whole+decoderSlack)[:0:whole+decoderSlack])
	if err == nil && len(data) != whole {
		err = fmt.Errorf("%d bytes of data instead of %d", len(data), whole)
	}
	if err != nil {
		return nil, l.damaged(fmt.Errorf("frame %d: %w", i, err))
	}
	return data, nil
}

// find finds a page: its frame and which of the payload's pages it is, -1
// for a zero page.
func (l *Layer) find(page int64) (i int, at int64, found bool) {
	i = sort.Search(len(l.frames), func(i int) bool { return l.frames[i].end() > page })
	if i == len(l.frames) {
		return 0, 0, false
	}
	at, found = l.frames[i].find(page)
	return i, at, found
}

// data gives a frame's data, from the recent ones if it is there.
func (l *Layer) data(i int) ([]byte, error) {
	l.mu.Lock()
	for _, p := range l.recent {
		if p.frame == i {
			l.mu.Unlock()
			return p.data, nil
		}
	}
	l.mu.Unlock()
	z, err := l.zstd()
	if err != nil {
		return nil, err
	}
	data, err := l.load(i, z, &buffers{})
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.recent) == recentPayloads {
		l.recent = append(l.recent[:0], l.recent[1:]...)
	}
	l.recent = append(l.recent, payload{i, data})
	return data, nil
}

// Verify reads the whole layer and checks every byte of it, that each frame
// can be decoded, and the digest of each page.
func (l *Layer) Verify(ctx context.Context) error {
	z, err := l.zstd()
	if err != nil {
		return err
	}
	return share(ctx, workers, len(l.frames), func() func(int) error {
		var b buffers
		return func(i int) error {
			data, err := l.load(i, z, &b)
			if err != nil {
				return err
			}
			for at, want := range l.frames[i].sums {
				if sumOf(data[at*PageSize:][:PageSize]) != want {
					return l.damaged(fmt.Errorf("frame %d: the digest of its page %d differs", i, at))
				}
			}
			return nil
		}
	})
}

// share does the work i for each i below n, by so many goroutines, each of which
// makes itself ready first. It ends at the first error.
func share(ctx context.Context, goroutines, n int, ready func() (work func(i int) error)) error {
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range goroutines {
		g.Go(func() error {
			work := ready()
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return nil
				}
				if err := ctx.Err(); err != nil {
					return err
				}
				if err := work(i); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// View shows the memory that a chain of layers stands for, page by page. It
// is for reading some pages; Materialize is the way to have them all.
type View struct {
	base   io.ReaderAt
	layers []*Layer
	size   int64
}

// NewView shows layers, lowest first, above base, which is the memory below
// the lowest one; nil is all zero. The layers stay the caller's.
func NewView(base io.ReaderAt, memoryBytes int64, layers ...*Layer) (*View, error) {
	if err := checkChain(memoryBytes, layers); err != nil {
		return nil, err
	}
	return &View{base: base, layers: layers, size: memoryBytes}, nil
}

// MemoryBytes is the size of the memory.
func (v *View) MemoryBytes() int64 { return v.size }

// checkChain checks that the layers follow each other.
func checkChain(memoryBytes int64, layers []*Layer) error {
	for i, l := range layers {
		if l.info.MemoryBytes != memoryBytes {
			return errdefs.New(errdefs.Incompatible, "memory layer %q is of a memory of %d bytes, not %d", l.name, l.info.MemoryBytes, memoryBytes)
		}
		if i > 0 && l.info.Parent != layers[i-1].info.ID {
			return errdefs.New(errdefs.Incompatible, "memory layer %q belongs above layer %q, not %q", l.name, l.info.Parent, layers[i-1].info.ID)
		}
	}
	return nil
}

// ReadAt reads whole pages of the memory, as io.ReaderAt.
func (v *View) ReadAt(b []byte, off int64) (n int, err error) {
	if off < 0 || off%PageSize != 0 || len(b)%PageSize != 0 {
		return 0, errdefs.New(errdefs.Invalid, "read %d bytes at offset %d of a memory: not whole pages", len(b), off)
	}
	for ; n < len(b); n += PageSize {
		if off+int64(n) >= v.size {
			return n, io.EOF
		}
		if err := v.page((off+int64(n))/PageSize, b[n:n+PageSize]); err != nil {
			return n, err
		}
	}
	return n, nil
}

func (v *View) page(page int64, b []byte) error {
	for _, l := range slices.Backward(v.layers) {
		i, at, found := l.find(page)
		if !found {
			continue
		}
		if at < 0 {
			clear(b)
			return nil
		}
		data, err := l.data(i)
		if err != nil {
			return err
		}
		copy(b, data[at*PageSize:])
		return nil
	}
	if v.base == nil {
		clear(b)
		return nil
	}
	return readFull(v.base, b, page*PageSize)
}

// Same reports whether the memory's page has this content. In the layers it
// compares digests and decodes nothing.
func (v *View) Same(page int64, content []byte) (bool, error) {
	for _, l := range slices.Backward(v.layers) {
		i, at, found := l.find(page)
		if found && at >= 0 {
			return l.frames[i].sums[at] == sumOf(content), nil
		}
		if found {
			return isZero(content), nil
		}
	}
	if v.base == nil {
		return isZero(content), nil
	}
	b := make([]byte, PageSize)
	err := readFull(v.base, b, page*PageSize)
	return err == nil && bytes.Equal(b, content), err
}

func isZero(b []byte) bool {
	return bytes.Equal(b, make([]byte, PageSize))
}
