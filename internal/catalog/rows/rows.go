// Package rows says how layers, chains, checkpoints and their parts stand in
// the catalog's tables: it reads and writes them within a transaction of its
// caller. It begins no transaction and holds no rule between records; those
// are the catalog's.
package rows

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// NotFound is the error of a reference to something that is not there; list is
// the command that shows what is.
func NotFound(noun, ref, list string) error {
	return errdefs.New(errdefs.NotFound, "find %s %q: there is none; see %s", noun, ref, list)
}

// NoImage is the error of a reference that no image answers to; where there is
// none at all, it says how to make one.
func NoImage(ctx context.Context, q database.Querier, ref string) error {
	missing := NotFound("image", ref, "holdpoint image ls")
	some, err := database.One(ctx, q, missing, database.Value[bool], `SELECT EXISTS (SELECT 1 FROM images)`)
	if err == nil && !some {
		return errdefs.New(errdefs.NotFound, "find image %q: there is no image yet; make one with holdpoint image build debian", ref)
	}
	return missing
}

// part is a row that belongs to a checkpoint.
type part[T any] struct {
	checkpoint string
	value      T
}
