package rows

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// NoImage is the error of a reference that no image answers to.
func NoImage(ref string) error { return NotFound("image", ref, "holdpoint image ls") }

// NoImageYet is NoImage; where there is no image at all, it says how to make one.
func NoImageYet(ctx context.Context, q database.Querier, ref string) error {
	missing := NoImage(ref)
	some, err := database.One(ctx, q, missing, database.Value[bool], `SELECT EXISTS (SELECT 1 FROM images)`)
	if err == nil && !some {
		return errdefs.New(errdefs.NotFound, "find image %q: there is no image yet; make one with holdpoint image build debian", ref)
	}
	return missing
}
