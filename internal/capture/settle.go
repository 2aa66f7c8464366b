package capture

import (
	"context"
	"errors"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Decide ends a published full checkpoint whose run was kept paused: with
// resume the run goes on, without it stays as it is until it is killed or
// resumed by its user. What is staged is removed. The caller's cancel does not
// reach it.
func (c *Capturer) Decide(ctx context.Context, source FullSource, d FullDetail, resume bool) error {
	_, err := c.decide(ctx, source, d, true, resume)
	return err
}

func (c *Capturer) decide(ctx context.Context, source FullSource, d FullDetail, published, resume bool) (settled Settled, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	if source != nil {
		settled, err = source.SettleCapture(ctx, d.CheckpointID, published, resume)
	}
	if errdefs.Is(err, errdefs.WrongState) {
		err = nil // the run has ended: nothing waits for the word
	}
	if d.Dir == "" {
		return settled, err
	}
	return settled, errors.Join(err, c.cfg.Files.RemoveAll(d.Dir))
}

// SettleFull finishes or undoes the full or frozen checkpoint of a daemon that died, from
// any phase, and reports whether it is published. source is the run it was
// taken of, nil if that has ended; resume is whether the run goes on that was
// kept paused.
func (c *Capturer) SettleFull(ctx context.Context, m catalog.Machine, d FullDetail, source FullSource, resume bool) (published bool, err error) {
	_, err = c.cfg.Catalog.GetCheckpoint(ctx, d.CheckpointID)
	switch {
	case err == nil:
		return true, c.Decide(ctx, source, d, d.StayPaused && resume)
	case !errdefs.Is(err, errdefs.NotFound):
		return false, err
	}
	return false, c.undo(ctx, m, source, d, resume)
}

// undo takes back a checkpoint that was not published: the run goes on,
// and the top that was prepared stays if it may have been written to.
func (c *Capturer) undo(ctx context.Context, m catalog.Machine, source FullSource, d FullDetail, resume bool) error {
	_, err := c.decide(ctx, source, d, false, d.StayPaused && resume)
	return errors.Join(err, c.settleTop(ctx, m, source, d.Layer))
}

// settleTop keeps the prepared top in the machine's chain unless the run is
// known to write to another one. Kept for nothing it is empty and harmless.
func (c *Capturer) settleTop(ctx context.Context, m catalog.Machine, source FullSource, top string) error {
	if top == "" {
		return c.DiscardUnused(ctx, m.ID) // no run was told of it yet
	}
	var disk []string
	if source != nil {
		disk, _ = source.Disk(ctx) // a run that does not say may have switched
	}
	if len(disk) > 0 && disk[len(disk)-1] != top {
		return c.Discard(ctx, m.ID, top)
	}
	chain, err := c.cfg.Catalog.Chain(ctx, m.ID)
	if err != nil {
		return err
	}
	n := len(chain) - 1
	if n < 1 || chain[n].ID != top {
		return nil // it was discarded already
	}
	if source == nil || len(disk) > 0 { // nothing writes below the top any more
		if _, _, err := c.seal(ctx, chain[:n]); err != nil {
			return err
		}
	}
	return c.cfg.Catalog.WakeTop(ctx, m.ID, top)
}
