//go:build linux

package command

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/link"
)

// source is one end that output comes from.
type source struct {
	f      *os.File
	stderr bool

	mu    sync.Mutex
	over  bool
	until time.Time // end of drainGrace
	owed  int       // bytes that were there at the command's end
	after int       // bytes read since
}

// ended is called when the command has ended.
func (s *source) ended() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	s.until = time.Now().Add(drainGrace)
	s.owed = s.waiting()
	_ = s.f.SetReadDeadline(s.until)
}

// waiting is how many bytes could be read now.
func (s *source) waiting() int {
	raw, err := s.f.SyscallConn()
	if err != nil {
		return 0
	}
	n := 0
	_ = raw.Control(func(fd uintptr) {
		n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ)
	})
	return n
}

// more notes that n bytes were read and decides whether to read on. After the
// grace it does so while there is something that may be the command's own; a
// read that was under way at its end may be counted though it came before,
// hence the Piece.
func (s *source) more(n int, err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.over {
		return err == nil
	}
	s.after += n
	switch late := !time.Now().Before(s.until); {
	case err == nil && late:
		_ = s.f.SetReadDeadline(s.until) // have the next read come here first
		return true
	case errors.Is(err, os.ErrDeadlineExceeded) && s.waiting() > 0 && s.after < s.owed+Piece:
		_ = s.f.SetReadDeadline(time.Time{})
		return true
	}
	return err == nil
}

// pump carries output until its end.
func (s *source) pump(out *output) {
	var buffer link.Buffer
	for {
		piece, err := buffer.Read(s.f)
		if len(piece) > 0 {
			out.write(s.stderr, piece)
		}
		if !s.more(len(piece), err) {
			return
		}
	}
}

// widen makes a pipe hold one Piece, so that output moves in large pieces.
func widen(f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, Piece) // a limit may forbid it; it is slower then
	})
}
