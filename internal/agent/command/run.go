//go:build linux

package command

import (
	"context"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// maxOutput is what Output keeps, in bytes; the rest is read and dropped.
const maxOutput = 64 << 10

// Output runs a program as root, outside of the set's commands, and gives what
// it printed until it ended. With ctx it is killed, with all of its session.
// What it leaves behind may hold its output open: it is waited for as little as
// with other commands.
func (s *Set) Output(ctx context.Context, argv ...string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	child, err := s.Spawn(Spec{Argv: argv}, &syscall.SysProcAttr{Setsid: true}, null, w, w)
	_ = w.Close() // it is the child's
	if err != nil {
		return nil, err
	}
	output := make(chan []byte, 1)
	go func() {
		kept, _ := io.ReadAll(io.LimitReader(r, maxOutput)) // up to where the pipe breaks
		output <- kept
		_, _ = io.Copy(io.Discard, r)
	}()
	select {
	case <-child.Done():
	case <-ctx.Done():
		_ = syscall.Kill(-child.PID, syscall.SIGKILL) // ESRCH: it has just ended
		<-child.Done()
		return nil, ctx.Err()
	}
	_ = r.SetReadDeadline(time.Now().Add(drainGrace))
	kept := <-output
	if code := child.Code(); code != 0 {
		return kept, fmt.Errorf("exit status %d", code)
	}
	return kept, nil
}
