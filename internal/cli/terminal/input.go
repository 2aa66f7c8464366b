package terminal

import "io"

// Input reads a stream that may never say anything, such as a terminal, and
// can be told to stop doing so.
type Input interface {
	io.Reader
	// Stop makes a Read under way, and all later ones, return io.EOF. What it
	// had not read yet stays for others. It may be called twice.
	Stop()
}

// plainInput cannot interrupt a Read: for streams that are no files of the
// system, and where files cannot be polled. Its reader ends with the process.
type plainInput struct{ io.Reader }

func (plainInput) Stop() {}
