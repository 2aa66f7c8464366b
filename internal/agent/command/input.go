//go:build linux

package command

import (
	"errors"
	"io"
	"os"
	"sync"
	"time"
)

// input is what waits to be read by a command.
type input struct {
	f   *os.File
	tty bool

	mu      sync.Mutex
	queue   [][]byte
	queued  int
	ending  bool
	stopped bool
	changed chan struct{}
	loop    sync.WaitGroup
}

func newInput(f *os.File, tty bool) *input {
	in := &input{f: f, tty: tty, changed: make(chan struct{})}
	in.loop.Go(in.run)
	return in
}

func (in *input) wake() {
	close(in.changed)
	in.changed = make(chan struct{})
}

func (in *input) write(p []byte) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for in.queued >= stdinQueue && !in.stopped {
		changed := in.changed
		in.mu.Unlock()
		<-changed
		in.mu.Lock()
	}
	if in.stopped || in.ending || len(p) == 0 {
		return
	}
	in.queue = append(in.queue, p)
	in.queued += len(p)
	in.wake()
}

func (in *input) end() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.ending {
		in.ending = true
		in.wake()
	}
}

// stop ends the input at once and waits for the writer.
func (in *input) stop() {
	in.mu.Lock()
	in.stopped = true
	_ = in.f.SetWriteDeadline(time.Unix(1, 0))
	in.wake()
	in.mu.Unlock()
	in.loop.Wait()
	if !in.tty {
		_ = in.f.Close()
	}
}

// next waits for the next piece; io.EOF is the end.
func (in *input) next() ([]byte, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for {
		switch {
		case in.stopped:
			return nil, io.ErrClosedPipe
		case len(in.queue) > 0:
			p := in.queue[0]
			in.queue = in.queue[1:]
			in.queued -= len(p)
			in.wake()
			return p, nil
		case in.ending:
			return nil, io.EOF
		}
		changed := in.changed
		in.mu.Unlock()
		<-changed
		in.mu.Lock()
	}
}

func (in *input) run() {
	for {
		p, err := in.next()
		if errors.Is(err, io.EOF) && in.tty {
			_, _ = in.f.Write([]byte{4}) // end of input, typed
			return
		}
		if err == nil {
			_, err = in.f.Write(p)
		}
		if err != nil {
			in.mu.Lock()
			in.stopped = true
			in.queue = nil
			in.wake()
			in.mu.Unlock()
			if !in.tty {
				_ = in.f.Close()
			}
			return
		}
	}
}
