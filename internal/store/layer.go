package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"sync"

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
// life: Open, which checks all but the frames; each frame is checked when it
// is read; Close.
type Layer struct {
	info  Info
	name  string
	file  *os.File
	index []entry
	end   int64
	zstd  *zstd.Decoder

	mu sync.Mutex
	// runs are those of the frames read so far.
	runs map[int][]run
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
	l := &Layer{name: path, file: file, runs: make(map[int][]run)}
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
	return errdefs.New(errdefs.Storage, "memory layer %q is damaged: %w; use a checkpoint that does not need it", l.name, err)
}

// read reads the end, the beginning and the index.
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
	index := make([]byte, t.frames*entryLength)
	if err := readFull(l.file, index, t.indexOffset); err != nil {
		return err
	}
	digest := Digest(end[trailerLength-sha256.Size:])
	if rootDigest(head, index, end[:trailerLength-sha256.Size]) != digest {
		return errors.New("the digest of its index differs")
	}
	if l.index, err = parseIndex(index, h.memoryBytes/PageSize, t.indexOffset); err != nil {
		return err
	}
	l.end = t.indexOffset
	l.info = Info{
		ID: h.id, Parent: h.parent, MemoryBytes: h.memoryBytes,
		DataPages: t.dataPages, ZeroPages: t.zeroPages, Bytes: size, Digest: digest,
	}
	l.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(workers), zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderMaxMemory(maxFramePages*PageSize), zstd.WithDecoderMaxWindow(maxFramePages*PageSize))
	return err
}

// Info is what the layer says of itself.
func (l *Layer) Info() Info { return l.info }

// Close closes the file; nobody may be reading.
func (l *Layer) Close() error {
	if l.zstd != nil {
		l.zstd.Close()
	}
	return l.file.Close()
}

// load reads frame i and checks it. Its payload is not decoded yet.
func (l *Layer) load(i int) (parsedFrame, error) {
	e, end := l.index[i], l.end
	if i+1 < len(l.index) {
		end = l.index[i+1].offset
	}
	const longest = frameLength + maxFrameRuns*runLength + maxFramePages*PageSize
	if end-e.offset > longest {
		return parsedFrame{}, l.damaged(fmt.Errorf("frame %d: %d bytes are too many", i, end-e.offset))
	}
	b := make([]byte, end-e.offset)
	if err := readFull(l.file, b, e.offset); err != nil {
		return parsedFrame{}, l.damaged(fmt.Errorf("frame %d: %w", i, err))
	}
	if sha256.Sum256(b) != e.digest {
		return parsedFrame{}, l.damaged(fmt.Errorf("frame %d at %d: its digest differs", i, e.offset))
	}
	f, err := parseFrame(b, e)
	if err != nil {
		return f, l.damaged(fmt.Errorf("frame %d: %w", i, err))
	}
	return f, nil
}

// decode gives the pages of a frame. They may share memory with it.
func (l *Layer) decode(i int, f parsedFrame, into []byte) ([]byte, error) {
	if f.codec == codecNone {
		return f.payload, nil
	}
	whole := f.dataPages * PageSize
	if cap(into) < whole {
		into = make([]byte, 0, whole)
	}
	data, err := l.zstd.DecodeAll(f.payload, into[:0:whole])
	if err == nil && len(data) != whole {
		err = fmt.Errorf("%d bytes of data instead of %d", len(data), whole)
	}
	if err != nil {
		return nil, l.damaged(fmt.Errorf("frame %d: %w", i, err))
	}
	return data, nil
}

// page copies a page that the layer has into b.
func (l *Layer) page(page int64, b []byte) (found bool, err error) {
	i := sort.Search(len(l.index), func(i int) bool { return l.index[i].end > page })
	if i == len(l.index) || l.index[i].first > page {
		return false, nil
	}
	runs, data, err := l.frame(i, page)
	if err != nil {
		return false, err
	}
	at := int64(0)
	for _, r := range runs {
		within := page - r.first
		switch {
		case within < 0:
			return false, nil
		case within < r.count && !r.data:
			clear(b)
			return true, nil
		case within < r.count:
			copy(b, data[(at+within)*PageSize:])
			return true, nil
		case r.data:
			at += r.count
		}
	}
	return false, nil
}

// frame gives a frame's runs and, if page is one of its pages with data, its
// data, from the recent ones if they are there.
func (l *Layer) frame(i int, page int64) ([]run, []byte, error) {
	l.mu.Lock()
	runs, known := l.runs[i]
	for n, p := range l.recent {
		if p.frame == i {
			l.recent = append(append(l.recent[:n:n], l.recent[n+1:]...), p)
			l.mu.Unlock()
			return runs, p.data, nil
		}
	}
	l.mu.Unlock()
	if known && !hasData(runs, page) {
		return runs, nil, nil
	}
	f, err := l.load(i)
	if err != nil {
		return nil, nil, err
	}
	var data []byte
	if hasData(f.runs, page) {
		if data, err = l.decode(i, f, nil); err != nil {
			return nil, nil, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runs[i] = f.runs
	if data != nil {
		l.recent = append(l.recent[max(0, len(l.recent)-recentPayloads+1):len(l.recent):len(l.recent)], payload{i, data})
	}
	return f.runs, data, nil
}

func hasData(runs []run, page int64) bool {
	i := sort.Search(len(runs), func(i int) bool { return runs[i].first+runs[i].count > page })
	return i < len(runs) && runs[i].first <= page && runs[i].data
}

// Verify reads the whole layer and checks every byte of it, and that each
// frame can be decoded.
func (l *Layer) Verify(ctx context.Context) error {
	var mu sync.Mutex
	var data, zero int64
	err := l.each(ctx, nil, func(f parsedFrame, _ []byte) error {
		mu.Lock()
		defer mu.Unlock()
		for _, r := range f.runs {
			if r.data {
				data += r.count
			} else {
				zero += r.count
			}
		}
		return nil
	})
	if err == nil && (data != l.info.DataPages || zero != l.info.ZeroPages) {
		err = l.damaged(fmt.Errorf("it has %d pages and %d zero ones instead of %d and %d", data, zero, l.info.DataPages, l.info.ZeroPages))
	}
	return err
}

// each calls use for each frame but the skipped ones, decoded, from several
// goroutines and in no order. data is valid during the call.
func (l *Layer) each(ctx context.Context, skip func(entry) bool, use func(f parsedFrame, data []byte) error) error {
	g, ctx := errgroup.WithContext(ctx)
	frames := make(chan int)
	g.Go(func() error {
		defer close(frames)
		for i, e := range l.index {
			if skip != nil && skip(e) {
				continue
			}
			select {
			case frames <- i:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	for range workers {
		g.Go(func() error {
			buffer := make([]byte, 0, batchPages*PageSize)
			for i := range frames {
				f, err := l.load(i)
				if err != nil {
					return err
				}
				data, err := l.decode(i, f, buffer)
				if err != nil {
					return err
				}
				if err := use(f, data); err != nil {
					return err
				}
			}
			return nil
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
	for i := len(v.layers) - 1; i >= 0; i-- {
		if found, err := v.layers[i].page(page, b); found || err != nil {
			return err
		}
	}
	if v.base == nil {
		clear(b)
		return nil
	}
	return readFull(v.base, b, page*PageSize)
}
