//go:build linux

package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty/inject"
)

// LetSuccessorsTrace lets any process of the same user look into the fresh
// child pid. Under Yama's ptrace_scope 1 only its ancestors may, which a
// successor of ours is not; under any other scope there is nothing to permit.
// The call has to be the child's own: made inside it, it costs half a
// millisecond, where a program of ours that makes it and then becomes QEMU
// takes the time to start one.
func LetSuccessorsTrace(ctx context.Context, scopeFile string, pid int) error {
	scope, err := os.ReadFile(scopeFile)
	if err != nil || strings.TrimSpace(string(scope)) != "1" {
		return nil //nolint:nilerr // without the file there is no Yama
	}
	return permitTrace(ctx, pid)
}

func permitTrace(ctx context.Context, pid int) error {
	const anyone = ^uint64(0) // PR_SET_PTRACER_ANY
	err := inject.Do(ctx, pid, func(s *inject.Session) error {
		_, err := s.Call(unix.SYS_PRCTL, unix.PR_SET_PTRACER, anyone, 0, 0, 0)
		return err
	})
	if err != nil && !errors.Is(err, unix.EINVAL) { // what a kernel without Yama says
		return fmt.Errorf("permit to trace process %d: %w", pid, err)
	}
	return nil
}
