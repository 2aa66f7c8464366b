package tarstream

// beside does one thing at a time beside what its owner does, so that the disk
// works while the stream waits for its other end and the other way round. Its
// zero value is ready; whoever calls begin waits before it returns.
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
