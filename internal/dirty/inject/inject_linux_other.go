//go:build linux && !amd64

package inject

import (
	"context"
	"runtime"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Session does not exist on this architecture.
type Session struct{}

// Do is UNSUPPORTED on this architecture.
func Do(context.Context, int, func(*Session) error) error {
	return errdefs.New(errdefs.Unsupported, "system calls inside another process are made for amd64 hosts, not %s", runtime.GOARCH)
}

// Call is never reached: there is no session.
func (*Session) Call(uint64, ...uint64) (int, error) {
	panic("inject: no session on this architecture")
}

// WithString is never reached: there is no session.
func (*Session) WithString(string, func(uint64) error) error {
	panic("inject: no session on this architecture")
}
