//go:build !unix

package store

import "github.com/holdpoint/holdpoint/internal/errdefs"

// writeError gives an error of a write its kind.
func writeError(err error) error { return errdefs.As(errdefs.Storage, err) }
