package catalog

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// AddOverlay records a layer, whose file exists and is synced, as the new top
// of the machine's chain. Call it before anything uses the file.
func (c *Catalog) AddOverlay(ctx context.Context, machineID string, l Layer) error {
	return c.db.Write(ctx, "add-overlay", func(t *database.Tx) error {
		if _, err := machineOf(t, machineID); err != nil {
			return err
		}
		if err := rows.InsertLayer(t, l); err != nil {
			return err
		}
		return rows.PushLayer(t, machineID, l.ID)
	})
}

// AddLayer records a layer of any format that nothing has yet and leases it to
// the operation, which keeps it until the operation ends.
func (c *Catalog) AddLayer(ctx context.Context, opID string, l Layer) error {
	return c.AddLayers(ctx, opID, l)
}

// AddLayers is AddLayer of several layers in one commit.
func (c *Catalog) AddLayers(ctx context.Context, opID string, layers ...Layer) error {
	return c.db.Write(ctx, "add-layer", func(t *database.Tx) error {
		for _, l := range layers {
			if err := rows.InsertLayer(t, l); err != nil {
				return err
			}
			if err := rows.LeaseLayer(t, opID, l.ID); err != nil {
				return err
			}
		}
		return nil
	})
}

// DropTop takes an unused overlay off the machine's chain again. A layer that
// is not the top, or one that a run may have written, is WRONG_STATE.
func (c *Catalog) DropTop(ctx context.Context, machineID, layerID string) error {
	return c.db.Write(ctx, "drop-top", func(t *database.Tx) error {
		chain, err := rows.Chain(ctx, t, machineID)
		if err != nil {
			return err
		}
		n := len(chain)
		if n < 2 || chain[n-1].ID != layerID || chain[n-1].State != LayerCreated {
			return errdefs.New(errdefs.WrongState, "drop layer %s of machine %s: it is not an unused top above another layer", layerID, machineID)
		}
		return t.Do(`DELETE FROM chains WHERE machine_id = ? AND layer_id = ?`, machineID, layerID)
	})
}

// Chain gives a machine's live chain, lowest first, without the image.
func (c *Catalog) Chain(ctx context.Context, machineID string) ([]Layer, error) {
	return rows.Chain(ctx, c.db, machineID)
}

// MemoryChain gives the memory layers since which the pages of a machine's run
// are counted, or that it goes on from when it is suspended, lowest first;
// none for a boot without a full checkpoint since.
func (c *Catalog) MemoryChain(ctx context.Context, machineID string) ([]Layer, error) {
	return rows.MachineMemory(ctx, c.db, machineID)
}

// WakeTop records that the machine's run writes to the top of its chain, which
// is layerID, and to no other layer any more. Another top is WRONG_STATE.
func (c *Catalog) WakeTop(ctx context.Context, machineID, layerID string) error {
	return c.db.Write(ctx, "wake-top", func(t *database.Tx) error {
		m, err := machineOf(t, machineID)
		if err != nil {
			return err
		}
		chain, err := rows.Chain(ctx, t, machineID)
		if err != nil {
			return err
		}
		if len(chain) == 0 || chain[len(chain)-1].ID != layerID {
			return errdefs.New(errdefs.WrongState, "wake layer %s of machine %q: it is not the top of its disk", layerID, m.Name)
		}
		return wakeTop(t, m)
	})
}

// wakeTop makes the top of a machine's chain live and seals what is below.
func wakeTop(t *database.Tx, m Machine) error {
	chain, err := rows.Chain(t.Ctx, t, m.ID)
	if err != nil {
		return err
	}
	if len(chain) == 0 || chain[len(chain)-1].State == LayerSealed {
		return errdefs.New(errdefs.WrongState, "begin run of machine %q: the top of its disk is sealed; add an overlay first", m.Name)
	}
	for i, l := range chain {
		want := LayerSealed
		if i == len(chain)-1 {
			want = LayerLive
		}
		if l.State == want {
			continue
		}
		if err := t.Do(`UPDATE layers SET state = ? WHERE id = ?`, want, l.ID); err != nil {
			return err
		}
	}
	return nil
}

// SealLayers records that layers are read-only for good.
func (c *Catalog) SealLayers(ctx context.Context, ids ...string) error {
	return c.db.Write(ctx, "seal-layers", func(t *database.Tx) error { return rows.SealLayers(t, ids...) })
}

// MeasureLayers records what sealed layers take on the host, and their digests
// as far as they are not empty.
func (c *Catalog) MeasureLayers(ctx context.Context, list ...Measured) error {
	return c.db.Write(ctx, "measure-layers", func(t *database.Tx) error { return rows.Measure(t, list...) })
}

// GetLayers gives the layers of the ids, in their order; a missing one is NOT_FOUND.
func (c *Catalog) GetLayers(ctx context.Context, ids ...string) ([]Layer, error) {
	var list []Layer
	err := c.db.View(ctx, func(q database.Querier) error {
		for _, id := range ids {
			l, err := rows.GetLayer(ctx, q, id)
			if err != nil {
				return err
			}
			list = append(list, l)
		}
		return nil
	})
	return list, err
}

// ListLayers gives every recorded layer by path: a file in their place that is
// not among them was never recorded, and no machine uses it.
func (c *Catalog) ListLayers(ctx context.Context) ([]Layer, error) { return rows.Layers(ctx, c.db) }

// UnsignedLayers gives the disk layers of checkpoints whose digests are not known.
func (c *Catalog) UnsignedLayers(ctx context.Context) ([]Layer, error) {
	return rows.Unsigned(ctx, c.db)
}

// UnreferencedLayers gives the layers that nothing needs, oldest first. Nothing
// can come to need one again: remove its file, then call DeleteLayers.
func (c *Catalog) UnreferencedLayers(ctx context.Context) ([]Layer, error) {
	return rows.Unreferenced(ctx, c.db)
}

// DeleteLayers forgets layers whose files are gone. One that something needs
// is REFERENCED, and none is forgotten then; one that is not there is skipped.
func (c *Catalog) DeleteLayers(ctx context.Context, ids ...string) error {
	return c.db.Write(ctx, "delete-layers", func(t *database.Tx) error {
		for _, id := range ids {
			if err := rows.DeleteLayer(t, id); err != nil {
				return err
			}
		}
		return nil
	})
}
