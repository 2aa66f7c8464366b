//go:build linux

package blocks

import (
	"context"
	"errors"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

const replaceVerb = "replace layers of"

// Replace puts merged in the place of the sealed layers chain[from:to] of the
// whole chain, lowest first. They must show the same over what is below them.
// The machine may run; what its guest asks of the disk waits for some 5 ms. It
// may be repeated after an error, for the same layers or more; until it succeeds
// the disk rests on the one or the other, or on both.
func (d *Disk) Replace(ctx context.Context, chain []machine.Layer, from, to int, merged machine.Layer) error {
	if from < 1 || to <= from || to >= len(chain) {
		return errdefs.New(errdefs.Invalid, "%s run %s: layers %d to %d of %d: neither the lowest nor the top can be replaced",
			replaceVerb, d.RunID, from, to, len(chain))
	}
	if _, err := checkLayer(merged); err != nil {
		return fmt.Errorf("%s run %s: %w", replaceVerb, d.RunID, err)
	}
	named, err := d.Reach.ReadOnly(merged)
	if err != nil {
		return fmt.Errorf("%s run %s: %w", replaceVerb, d.RunID, err)
	}
	node, err := disk.MergedArgs(disk.Layer(named), chain[from-1].ID)
	if err != nil {
		return err
	}
	above, err := disk.ReopenArgs(disk.Layer(chain[to]), to == len(chain)-1, merged.ID)
	if err != nil {
		return err
	}
	var refused *qmp.Error
	if err := d.add(ctx, merged, node); err != nil && !errors.As(err, &refused) {
		return err // refused, it may be in its place already: the next step tells
	}
	if err := d.Execute(ctx, replaceVerb, "blockdev-reopen", above, nil); err != nil {
		// Refused when the layer above was reopened all the same.
		_ = Aside(ctx, func(ctx context.Context) error { return d.remove(ctx, merged) })
		return err
	}
	return Aside(ctx, func(ctx context.Context) error { return d.drop(ctx, chain[from:to]) })
}

// drop lets go of nodes on which nothing rests any more. Those that QEMU was
// started with have gone by themselves.
func (d *Disk) drop(ctx context.Context, layers []machine.Layer) error {
	for i := len(layers) - 1; i >= 0; i-- {
		var refused *qmp.Error
		if err := d.remove(ctx, layers[i]); err != nil && !errors.As(err, &refused) {
			return err
		}
		d.Reach.Forget(layers[i].ID)
	}
	return nil
}
