package tarstream

// beside does one thing at a time beside what its owner does, so that the disk
// works while the stream waits for its other end and the other way round. Its
// zero value is ready; whoever calls begin returns by way of end.
type beside struct{ done chan error }

// begin begins do; what was begun before has been waited for.
func (b *beside) begin(do func() error) {
	done := make(chan error, 1)
	b.done = done
	go func() { done <- do() }()
}

// wait waits for what was begun, if anything, and returns its error.
func (b *beside) wait() error {
	if b.done == nil {
		return nil
	}
	err := <-b.done
	b.done = nil
	return err
}

// end waits for what was begun, if anything. Its error is err unless there is
// one already.
func (b *beside) end(err *error) {
	if last := b.wait(); *err == nil {
		*err = last
	}
}

// pair is two equally long buffers, of which one is filled while the other is
// emptied. They are used again for what needs no longer ones.
type pair struct{ both []byte }

// of gives the buffers, each of size bytes at least.
func (p *pair) of(size int) (buf, next []byte) {
	if len(p.both) < 2*size {
		p.both = alignedBuffer(2 * size)
	}
	half := len(p.both) / 2
	return p.both[:half], p.both[half:]
}
