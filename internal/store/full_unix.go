//go:build unix

package store

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// writeError gives an error of a write its kind.
func writeError(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errdefs.New(errdefs.NoSpace, "%w; free some space on its file system", err)
	}
	return errdefs.As(errdefs.Storage, err)
}
