// Package rows says how layers, chains, checkpoints and their parts stand in
// the catalog's tables: it reads and writes them within a transaction of its
// caller. It begins no transaction and holds no rule between records; those
// are the catalog's.
package rows

import "github.com/holdpoint/holdpoint/internal/errdefs"

// NotFound is the error of a reference to something that is not there; list is
// the command that shows what is.
func NotFound(noun, ref, list string) error {
	return errdefs.New(errdefs.NotFound, "find %s %q: there is none; see %s", noun, ref, list)
}

// part is a row that belongs to a checkpoint.
type part[T any] struct {
	checkpoint string
	value      T
}
