package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// WriteConfig is what a layer is made from.
type WriteConfig struct {
	// ID is the layer's, Parent that of the layer below or empty.
	ID, Parent string
	// MemoryBytes is the size of the guest's memory.
	MemoryBytes int64
	// Pages gives the runs of pages that may have changed, by offset and length
	// in bytes: whole pages, ascending, not overlapping.
	Pages iter.Seq2[int64, int64]
	// Memory has the pages' content; only they are read, by two goroutines.
	Memory io.ReaderAt
	// Previous shows the memory below; pages that are the same there are
	// dropped. Nil is all zero.
	Previous *View
}

// Summary says what was written.
type Summary struct {
	Digest Digest
	// Bytes is the length of the file.
	Bytes int64
	// DataPages and ZeroPages are in the layer; SamePages were dropped.
	DataPages, ZeroPages, SamePages int64
}

const (
	// workers is how many goroutines encode or decode. The guest and QEMU
	// want the other CPUs.
	workers = 2
	// batchPages is the most that the writer puts into a frame.
	batchPages = 64
)

// Write writes a layer to w, from its first byte to its last; nothing is
// durable when it returns, and after an error w has an unusable part of it.
func Write(ctx context.Context, w io.Writer, cfg WriteConfig) (Summary, error) {
	h := header{id: cfg.ID, parent: cfg.Parent, memoryBytes: cfg.MemoryBytes}
	if err := h.check(); err != nil {
		return Summary{}, errdefs.New(errdefs.Invalid, "write memory layer %q: %w", cfg.ID, err)
	}
	out := &output{w: w}
	err := out.write(h.encode())
	if err == nil {
		err = encodeAll(ctx, cfg, out)
	}
	if err == nil {
		err = out.finish(h)
	}
	if err != nil {
		return Summary{}, fmt.Errorf("write memory layer %q: %w", cfg.ID, err)
	}
	return out.summary, nil
}

// encodeAll cuts the pages into batches, which workers encode and output takes
// in order.
func encodeAll(ctx context.Context, cfg WriteConfig, out *output) error {
	g, ctx := errgroup.WithContext(ctx)
	jobs := make(chan *batch)
	inOrder := make(chan *batch, 2*workers)
	g.Go(func() error {
		defer close(jobs)
		defer close(inOrder)
		return cut(cfg, func(b *batch) error {
			for _, c := range []chan<- *batch{inOrder, jobs} {
				select {
				case c <- b:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return nil
		})
	})
	for range workers {
		g.Go(func() error {
			e, err := newEncoder(cfg)
			if err != nil {
				return err
			}
			for b := range jobs {
				if err := e.encode(b); err != nil {
					return err
				}
				close(b.done)
			}
			return nil
		})
	}
	g.Go(func() error {
		for b := range inOrder {
			select {
			case <-b.done:
			case <-ctx.Done():
				return ctx.Err()
			}
			if err := out.take(b); err != nil {
				return err
			}
		}
		return out.flushZero()
	})
	return g.Wait()
}

// batch is up to batchPages pages on their way.
type batch struct {
	spans []run
	// done is closed when what is below is set.
	done chan struct{}
	// frame has no runs when all pages are the same as below, and no payload
	// when none has data.
	frame   frame
	payload []byte
	same    int64
}

// cut gives the pages in batches.
func cut(cfg WriteConfig, emit func(*batch) error) error {
	b, n, next := &batch{done: make(chan struct{})}, int64(0), int64(0)
	for offset, length := range cfg.Pages {
		if offset < next || length <= 0 || (offset|length)%PageSize != 0 || length > cfg.MemoryBytes-offset {
			return errdefs.New(errdefs.Invalid, "%d bytes at offset %d of the memory are not ascending whole pages of it", length, offset)
		}
		next = offset + length
		for offset < next {
			count := min((next-offset)/PageSize, batchPages-n)
			b.spans = append(b.spans, run{first: offset / PageSize, count: count})
			offset += count * PageSize
			if n += count; n == batchPages {
				if err := emit(b); err != nil {
					return err
				}
				b, n = &batch{done: make(chan struct{})}, 0
			}
		}
	}
	if n == 0 {
		return nil
	}
	return emit(b)
}

// encoder is what one worker has for itself.
type encoder struct {
	cfg       WriteConfig
	zstd      *zstd.Encoder
	now, kept []byte
	zero      [PageSize]byte
}

func newEncoder(cfg WriteConfig) (*encoder, error) {
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true))
	if err != nil {
		return nil, fmt.Errorf("make zstd encoder: %w", err)
	}
	const size = batchPages * PageSize
	return &encoder{cfg: cfg, zstd: z, now: make([]byte, size), kept: make([]byte, 0, size)}, nil
}

// encode reads the batch's pages, drops what is the same, and makes the frame.
func (e *encoder) encode(b *batch) error {
	e.kept = e.kept[:0]
	for _, s := range b.spans {
		now := e.now[:s.count*PageSize]
		if err := readFull(e.cfg.Memory, now, s.first*PageSize); err != nil {
			return fmt.Errorf("read pages from %d: %w", s.first, err)
		}
		for i := range s.count {
			if err := e.page(b, s.first+i, now[i*PageSize:][:PageSize]); err != nil {
				return err
			}
		}
	}
	f := &b.frame
	f.codec, b.payload = codecZstd, e.zstd.EncodeAll(e.kept, make([]byte, 0, len(e.kept)))
	if len(b.payload) >= len(e.kept) {
		f.codec, b.payload = codecNone, bytes.Clone(e.kept)
	}
	f.stored, f.digest = len(b.payload), sha256.Sum256(b.payload)
	return nil
}

// page puts one page where it belongs.
func (e *encoder) page(b *batch, page int64, now []byte) error {
	zero := bytes.Equal(now, e.zero[:])
	same, err := zero, error(nil)
	if e.cfg.Previous != nil {
		if same, err = e.cfg.Previous.Same(page, now); err != nil {
			return fmt.Errorf("compare page %d: %w", page, err)
		}
	}
	switch {
	case same:
		b.same++
		return nil
	case !zero:
		b.frame.sums = append(b.frame.sums, sumOf(now))
		e.kept = append(e.kept, now...)
	}
	b.frame.runs = add(b.frame.runs, run{first: page, count: 1, data: !zero})
	return nil
}

func readFull(r io.ReaderAt, b []byte, off int64) error {
	n, err := r.ReadAt(b, off)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// output writes the payloads in order and keeps the table.
type output struct {
	w       io.Writer
	summary Summary
	table   []byte
	frames  int64
	// zero are runs of zero pages that wait for their frame.
	zero []run
}

func (o *output) write(b []byte) error {
	n, err := o.w.Write(b)
	o.summary.Bytes += int64(n)
	return err
}

func (o *output) take(b *batch) error {
	o.summary.SamePages += b.same
	o.summary.DataPages += int64(len(b.frame.sums))
	for _, r := range b.frame.runs {
		if !r.data {
			o.summary.ZeroPages += r.count
		}
	}
	if len(b.payload) > 0 {
		if err := o.flushZero(); err != nil {
			return err
		}
		return o.put(&b.frame, b.payload)
	}
	for _, r := range b.frame.runs {
		if len(o.zero) == maxFrameRuns {
			if err := o.flushZero(); err != nil {
				return err
			}
		}
		o.zero = add(o.zero, r)
	}
	return nil
}

func (o *output) flushZero() error {
	if len(o.zero) == 0 {
		return nil
	}
	err := o.put(&frame{runs: o.zero, digest: sha256.Sum256(nil)}, nil)
	o.zero = o.zero[:0]
	return err
}

func (o *output) put(f *frame, payload []byte) error {
	o.table = f.encode(o.table)
	if o.frames++; o.frames > maxFrames || len(o.table) > maxTable {
		return errdefs.New(errdefs.Unsupported, "the memory has changed in more places than a layer can hold")
	}
	if len(payload) == 0 {
		return nil
	}
	return o.write(payload)
}

// finish writes the table and the trailer.
func (o *output) finish(h header) error {
	end := trailer{
		tableOffset: o.summary.Bytes, frames: o.frames,
		dataPages: o.summary.DataPages, zeroPages: o.summary.ZeroPages,
	}.encode()
	o.summary.Digest = rootDigest(h.encode(), o.table, end)
	return o.write(slices.Concat(o.table, end, o.summary.Digest[:]))
}
