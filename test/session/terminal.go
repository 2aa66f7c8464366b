package session

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/creack/pty"
	"github.com/rogpeppe/go-internal/testscript"
)

// settled is how long a command must have been silent before it is typed to:
// long enough for its question, and for the tty to be made raw.
const settled = 300 * time.Millisecond

// screen is what a terminal shows.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
	last time.Time
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = time.Now()
	return s.text.Write(p)
}

// waits reports whether something was said and then nothing for a while.
func (s *screen) waits() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Len() > 0 && time.Since(s.last) > settled
}

func cmdTerminal(ts *testscript.TestScript, neg bool, args []string) {
	Usage(ts, neg, args, 3, "terminal N INPUT CMD…")
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, Of(ts).program(args[2]), args[3:]...)
	cmd.Env = append(append(os.Environ(), Of(ts).Env...), "TERM=dumb")
	cmd.Dir = ts.MkAbs(".")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
	ts.Check(err)
	defer tty.Close()
	s := &screen{}
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 4096)
		for {
			n, err := tty.Read(buf)
			_, _ = s.Write(buf[:n])
			if err != nil { // EIO: its last user is gone
				return
			}
		}
	}()
	ts.Check(Await(func() error {
		if !s.waits() {
			return errors.New("it never waits for input")
		}
		return nil
	}))
	_, err = tty.WriteString(strings.NewReplacer(`\r`, "\r", "^P", "\x10", "^Q", "\x11").Replace(args[1]))
	ts.Check(err)
	code := exitCode(ts, cmd.Wait())
	<-read
	if ctx.Err() != nil {
		ts.Fatalf("it does not end; the terminal shows %q", s.text.String())
	}
	setStdout(ts, s.text.Bytes())
	if code != want {
		ts.Fatalf("exit code is %d, want %d", code, want)
	}
}
