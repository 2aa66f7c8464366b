package link

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// openFifo opens a pipe as if it were a port.
func openFifo(t *testing.T) Port {
	t.Helper()
	name := filepath.Join(t.TempDir(), "port")
	if err := unix.Mkfifo(name, 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := OpenPort(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestPort waits, reads, writes, times out and closes on a pipe, which gives
// back what was written; a host that comes and goes needs a real port.
func TestPort(t *testing.T) {
	p := openFifo(t)
	say := bytes.Repeat([]byte("0123456789abcdef"), 40_000) // more than a pipe holds
	wrote := make(chan error, 1)
	go func() { _, err := p.Write(say); wrote <- err }()
	got := make([]byte, len(say))
	if _, err := io.ReadFull(p, got); err != nil || !bytes.Equal(got, say) {
		t.Fatalf("read: %v", err)
	}
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}

	_ = p.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := p.Read(got); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("read past the deadline: %v", err)
	}
	_ = p.SetReadDeadline(time.Time{})
	read := make(chan error, 1)
	go func() { _, err := p.Read(got); read <- err }()
	_ = p.SetReadDeadline(past()) // moved while somebody waits
	if err := <-read; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("read with a moved deadline: %v", err)
	}

	go func() { _, err := p.Write(make([]byte, 1<<20)); wrote <- err }() // nobody reads
	_ = p.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
	if err := <-wrote; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("write past the deadline: %v", err)
	}
	_ = p.SetWriteDeadline(time.Time{})
	go func() { _, err := p.Write(make([]byte, 1<<20)); wrote <- err }()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-wrote; err == nil {
		t.Fatal("a write ended well though the port was closed")
	}
	if _, err := p.Read(got); !errors.Is(err, os.ErrClosed) {
		t.Fatalf("read of a closed port: %v", err)
	}
}

// TestPortWriterTellsReader has a writer wait for room: its polls may take what
// the reader waits for, so the reader must be made to look.
func TestPortWriterTellsReader(t *testing.T) {
	p := openFifo(t).(*virtioPort)
	wrote := make(chan error, 1)
	go func() { _, err := p.Write(make([]byte, 1<<20)); wrote <- err }() // more than a pipe holds
	bell := []unix.PollFd{{Fd: int32(p.read.bell), Events: unix.POLLIN}}
	if n, err := unix.Poll(bell, 10_000); n != 1 {
		t.Errorf("the reader was not told: %v", err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	<-wrote
}
