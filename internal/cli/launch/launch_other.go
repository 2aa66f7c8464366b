//go:build !linux

package launch

import (
	"context"
	"errors"
)

func lock(context.Context, string) (unlock func(), err error) {
	// There is nothing to lock: no daemon starts or ends here.
	return func() {}, nil
}

func spawn(context.Context, []string, string) (pid int, err error) {
	return 0, errors.ErrUnsupported
}

func closeOnExec(int) {}
