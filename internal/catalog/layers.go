package catalog

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const layerColumns = `l.id, l.machine_id, l.path, l.format, l.virtual_bytes, l.stored_bytes, l.state, coalesce(l.digest, ''), l.created_at`

func scanLayer(rows *sql.Rows) (Layer, error) {
	var (
		l       Layer
		created int64
	)
	err := rows.Scan(&l.ID, &l.MachineID, &l.Path, &l.Format, &l.VirtualBytes, &l.StoredBytes, &l.State, &l.Digest, &created)
	l.CreatedAt = database.Time(created)
	return l, err
}

// insertLayer records a new layer; its state is created, whatever l says.
func insertLayer(t *database.Tx, l Layer) error {
	err := t.Do(`INSERT INTO layers VALUES (?, ?, ?, ?, ?, ?, 'created', NULL, ?)`,
		l.ID, l.MachineID, l.Path, l.Format, l.VirtualBytes, l.StoredBytes, t.OrNow(l.CreatedAt))
	if database.IsUnique(err) {
		return errdefs.New(errdefs.AlreadyExists, "record layer %s at %q: its id or path is recorded already", l.ID, l.Path)
	}
	return err
}

func pushLayer(t *database.Tx, machineID, layerID string) error {
	return t.Do(`INSERT INTO chains SELECT ?1, coalesce(max(position) + 1, 0), ?2 FROM chains WHERE machine_id = ?1`, machineID, layerID)
}

// AddOverlay records a layer, whose file exists and is synced, as the new top
// of the machine's chain. Call it before anything uses the file.
func (c *Catalog) AddOverlay(ctx context.Context, machineID string, l Layer) error {
	return c.db.Write(ctx, "add-overlay", func(t *database.Tx) error {
		if _, err := machineOf(t, machineID); err != nil {
			return err
		}
		if err := insertLayer(t, l); err != nil {
			return err
		}
		return pushLayer(t, machineID, l.ID)
	})
}

// AddLayer records a layer that is in no chain yet and leases it to the
// operation, which keeps it until the operation ends.
func (c *Catalog) AddLayer(ctx context.Context, opID string, l Layer) error {
	return c.db.Write(ctx, "add-layer", func(t *database.Tx) error {
		if err := insertLayer(t, l); err != nil {
			return err
		}
		return t.Do(`INSERT INTO leases VALUES ('layer', ?, ?, 1, ?)`, l.ID, opID, t.Now.Add(time.Hour).UnixNano())
	})
}

// DropTop takes an unused overlay off the machine's chain again. A layer that
// is not the top, or one that a run may have written, is WRONG_STATE.
func (c *Catalog) DropTop(ctx context.Context, machineID, layerID string) error {
	return c.db.Write(ctx, "drop-top", func(t *database.Tx) error {
		chain, err := chainOf(ctx, t, machineID)
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
	return chainOf(ctx, c.db, machineID)
}

func chainOf(ctx context.Context, q database.Querier, machineID string) ([]Layer, error) {
	return database.All(ctx, q, scanLayer, `SELECT `+layerColumns+`
		FROM chains c JOIN layers l ON l.id = c.layer_id WHERE c.machine_id = ? ORDER BY c.position`, machineID)
}

// wakeTop makes the top of a machine's chain live and seals what is below.
func wakeTop(t *database.Tx, m Machine) error {
	chain, err := chainOf(t.Ctx, t, m.ID)
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
	return c.db.Write(ctx, "seal-layers", func(t *database.Tx) error { return sealLayers(t, ids) })
}

func sealLayers(t *database.Tx, ids []string) error {
	for _, id := range ids {
		if err := t.DoOne(noLayer(id), `UPDATE layers SET state = 'sealed' WHERE id = ?`, id); err != nil {
			return err
		}
	}
	return nil
}

// SetLayerStored records what a sealed layer takes on the host, and its digest
// if that is not empty.
func (c *Catalog) SetLayerStored(ctx context.Context, id string, bytes int64, digest string) error {
	return c.db.Write(ctx, "set-layer-stored", func(t *database.Tx) error {
		missing := errdefs.New(errdefs.WrongState, "measure layer %s: there is none that is sealed", id)
		return t.DoOne(missing, `UPDATE layers SET stored_bytes = ?, digest = coalesce(nullif(?, ''), digest)
			WHERE id = ? AND state = 'sealed'`, bytes, digest, id)
	})
}

func noLayer(id string) error { return notFound("layer", id, "holdpoint checkpoint show") }

// GetLayers gives the layers of the ids, in their order; a missing one is NOT_FOUND.
func (c *Catalog) GetLayers(ctx context.Context, ids ...string) ([]Layer, error) {
	var list []Layer
	err := c.db.View(ctx, func(q database.Querier) error {
		for _, id := range ids {
			l, err := database.One(ctx, q, noLayer(id), scanLayer, `SELECT `+layerColumns+` FROM layers l WHERE l.id = ?`, id)
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
func (c *Catalog) ListLayers(ctx context.Context) ([]Layer, error) {
	return database.All(ctx, c.db, scanLayer, `SELECT `+layerColumns+` FROM layers l ORDER BY l.path`)
}

// unreferenced is true of a layer that no chain, checkpoint, displaced chain
// or lease (expired ones of running operations included) has.
const unreferenced = `NOT EXISTS (SELECT 1 FROM chains WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM checkpoint_layers WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM displaced_layers WHERE layer_id = l.id)
	AND NOT EXISTS (SELECT 1 FROM leases WHERE kind = 'layer' AND resource_id = l.id)`

// UnreferencedLayers gives the layers that nothing needs, oldest first. Nothing
// can come to need one again: remove its file, then call DeleteLayers.
func (c *Catalog) UnreferencedLayers(ctx context.Context) ([]Layer, error) {
	return database.All(ctx, c.db, scanLayer, `SELECT `+layerColumns+` FROM layers l
		WHERE `+unreferenced+` ORDER BY l.created_at, l.id`)
}

// DeleteLayers forgets layers whose files are gone. One that something needs
// is REFERENCED, and none is forgotten then; one that is not there is skipped.
func (c *Catalog) DeleteLayers(ctx context.Context, ids ...string) error {
	return c.db.Write(ctx, "delete-layers", func(t *database.Tx) error {
		for _, id := range ids {
			if err := t.Do(`DELETE FROM layers AS l WHERE l.id = ? AND `+unreferenced, id); err != nil {
				return err
			}
			left, err := database.All(ctx, t, database.Value[string], `SELECT id FROM layers WHERE id = ?`, id)
			if err != nil {
				return err
			}
			if len(left) > 0 {
				return errdefs.New(errdefs.Referenced, "delete layer %s: a machine, checkpoint or operation needs it", id)
			}
		}
		return nil
	})
}

// ReplaceChain is what a restore changes in the catalog.
type ReplaceChain struct {
	MachineID string
	// OperationID is the restore; what it displaces is kept under its id.
	OperationID string
	// CheckpointID is a checkpoint of the machine; the new chain is its layers and Top.
	CheckpointID string
	// Top is the new writable layer; it may have been staged by AddLayer.
	Top Layer
	// RunID is set when a run on the new chain answers already: Top is live
	// and the machine running then.
	RunID string
	// RestoreRoutes puts the machine's routes back to those of the
	// checkpoint. A host name that is another machine's by now stays there.
	RestoreRoutes bool
}

// ReplaceChain puts a machine's disk, spec and image back to a checkpoint in
// one commit, and keeps what that displaces until the operation ends. It
// returns the new generation.
func (c *Catalog) ReplaceChain(ctx context.Context, r ReplaceChain) (generation uint64, err error) {
	err = c.db.Write(ctx, "replace-chain", func(t *database.Tx) error {
		m, err := machineOf(t, r.MachineID)
		if err != nil {
			return err
		}
		ck, err := getCheckpoint(ctx, t, r.CheckpointID)
		if err != nil {
			return err
		}
		if ck.MachineID != m.ID {
			return errdefs.New(errdefs.Invalid, "restore machine %q: checkpoint %s is another machine's; choose one of its own", m.Name, ck.ID)
		}
		if err := displace(t, m, r); err != nil {
			return err
		}
		if err := installChain(t, m.ID, ck.Layers, r.Top); err != nil {
			return err
		}
		if r.RestoreRoutes {
			if err := restoreRoutes(t, m.ID, ck.Routes); err != nil {
				return err
			}
		}
		generation = m.Generation + 1
		err = t.Do(`UPDATE machines SET spec = ?, image_build_id = ?, head_checkpoint = ?, generation = ? WHERE id = ?`,
			string(ck.Spec), ck.ImageBuildID, ck.ID, int64(generation), m.ID)
		if err != nil || r.RunID == "" {
			return err
		}
		if err := wakeTop(t, m); err != nil {
			return err
		}
		return t.Do(`UPDATE machines SET run_id = ?, state = 'running', exit = '' WHERE id = ?`, r.RunID, m.ID)
	})
	return generation, err
}

func installChain(t *database.Tx, machineID string, layers []string, top Layer) error {
	if err := t.Do(`DELETE FROM chains WHERE machine_id = ?`, machineID); err != nil {
		return err
	}
	staged, err := database.All(t.Ctx, t, database.Value[LayerState], `SELECT state FROM layers WHERE id = ?`, top.ID)
	if err != nil {
		return err
	}
	if len(staged) == 0 {
		err = insertLayer(t, top)
	} else if staged[0] == LayerSealed {
		err = errdefs.New(errdefs.WrongState, "restore machine %s: layer %s is sealed and cannot be the top", machineID, top.ID)
	}
	if err != nil {
		return err
	}
	for _, id := range append(append([]string{}, layers...), top.ID) {
		if err := pushLayer(t, machineID, id); err != nil {
			return fmt.Errorf("record chain of machine %s: %w", machineID, err)
		}
	}
	return nil
}
