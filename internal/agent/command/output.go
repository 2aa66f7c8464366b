//go:build linux

package command

import (
	"context"
	"io"
	"sort"
	"sync"
)

const (
	// kept is how much output waits for its readers, and how much is kept
	// for those who attach later, in bytes.
	kept = 1 << 20
	// segmentCost is what a segment counts among what is kept besides its
	// bytes: about what it takes.
	segmentCost = 64
	// merge is up to which size small pieces of output become one.
	merge = 64 << 10
	// Piece is the largest piece of output or input at once, in bytes.
	Piece = 256 << 10
)

// output is what a command printed: bytes of two streams, in order, of which
// the last part is kept. While somebody reads, the command waits for the
// slowest reader; nobody's output is dropped.
type output struct {
	mu sync.Mutex
	// awaited is until the first reader comes, for whom all is kept.
	awaited bool
	// forgotten is when only what readers wait for is kept.
	forgotten bool
	segments  []segment
	start     uint64 // position of the first byte of segments
	end       uint64
	read      uint64 // up to here somebody has read
	dropped   uint64 // bytes that nobody has read
	readers   map[*Reader]struct{}
	closed    bool
	changed   chan struct{}
}

type segment struct {
	stderr bool
	at     uint64 // position of its first byte
	data   []byte
}

// newOutput is empty. If it is awaited, the command waits for the first reader
// rather than lose anything.
func newOutput(awaited bool) *output {
	return &output{awaited: awaited, readers: map[*Reader]struct{}{}, changed: make(chan struct{})}
}

// Reader reads a command's output. Close it.
type Reader struct {
	o   *output
	pos uint64
}

func (o *output) attach(history bool) *Reader {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := &Reader{o: o, pos: o.start}
	if !history {
		r.pos = o.end
	}
	o.readers[r] = struct{}{}
	o.awaited = false
	o.wake()
	return r
}

func (o *output) attached() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.readers) > 0
}

// wake tells all that wait. The caller holds mu.
func (o *output) wake() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// slowest is the position of the last reader, or end. The caller holds mu.
func (o *output) slowest() uint64 {
	if o.awaited {
		return o.start
	}
	pos := o.end
	for r := range o.readers {
		pos = min(pos, r.pos)
	}
	return pos
}

// write appends a copy of p, waiting for readers that are too far behind.
func (o *output) write(stderr bool, p []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.end-o.slowest() >= kept {
		changed := o.changed
		o.mu.Unlock()
		<-changed
		o.mu.Lock()
	}
	last := len(o.segments) - 1
	if last >= 0 && o.segments[last].stderr == stderr && len(o.segments[last].data)+len(p) <= merge {
		o.segments[last].data = append(o.segments[last].data, p...)
	} else {
		o.segments = append(o.segments, segment{stderr, o.end, append([]byte(nil), p...)})
	}
	o.end += uint64(len(p))
	o.trim()
	o.wake()
}

// trim lets go of what need not be kept. The caller holds mu.
func (o *output) trim() {
	slowest := o.slowest()
	for len(o.segments) > 0 {
		n := uint64(len(o.segments[0].data))
		cost := o.end - o.start + uint64(len(o.segments))*segmentCost
		if o.start+n > slowest || (!o.forgotten && cost <= kept) {
			return
		}
		if next := o.start + n; next > o.read {
			o.dropped += next - max(o.read, o.start)
		}
		o.start += n
		o.segments[0].data = nil
		o.segments = o.segments[1:]
	}
}

func (o *output) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.wake()
}

// forget lets go of all output.
func (o *output) forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.forgotten, o.awaited = true, false
	o.trim()
}

func (o *output) lost() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.dropped
}

func (o *output) size() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end - o.start
}

// Next waits for output and returns the next piece of one stream, valid for
// good. It returns io.EOF when the command has ended and all was read.
func (r *Reader) Next(ctx context.Context) (p []byte, stderr bool, err error) {
	o := r.o
	o.mu.Lock()
	defer o.mu.Unlock()
	for r.pos == o.end {
		if o.closed {
			return nil, false, io.EOF
		}
		changed := o.changed
		o.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		o.mu.Lock()
		if ctx.Err() != nil {
			return nil, false, context.Cause(ctx)
		}
	}
	// The last segment that begins at or before the reader's position.
	i := sort.Search(len(o.segments), func(i int) bool { return o.segments[i].at > r.pos }) - 1
	p = o.segments[i].data[r.pos-o.segments[i].at:]
	p = p[:min(len(p), Piece):min(len(p), Piece)]
	stderr = o.segments[i].stderr
	r.pos += uint64(len(p))
	o.read = max(o.read, r.pos)
	o.trim()
	o.wake()
	return p, stderr, nil
}

// Close stops reading; the command need not wait for this reader any more.
func (r *Reader) Close() {
	o := r.o
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.readers, r)
	o.trim()
	o.wake()
}
