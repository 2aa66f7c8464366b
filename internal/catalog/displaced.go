package catalog

import (
	"context"
	"database/sql"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// displace keeps what a restore takes from a machine.
func displace(t *database.Tx, m Machine, r ReplaceChain) error {
	err := t.Do(`INSERT INTO displaced SELECT ?1, id, image_build_id, spec, run_id, head_checkpoint, ?3 FROM machines WHERE id = ?2`,
		r.OperationID, m.ID, r.RestoreRoutes)
	if database.IsUnique(err) {
		return errdefs.New(errdefs.WrongState, "restore machine %q: operation %s has restored it already", m.Name, r.OperationID)
	}
	if err != nil {
		return err
	}
	err = t.Do(`INSERT INTO displaced_layers SELECT ?1, position, layer_id FROM chains WHERE machine_id = ?2`, r.OperationID, m.ID)
	if err != nil {
		return err
	}
	return t.Do(`INSERT INTO displaced_routes SELECT ?1, host, port, created_at FROM routes WHERE machine_id = ?2`, r.OperationID, m.ID)
}

type displacedRow struct {
	machineID, image, spec, runID, head string
	routesReplaced                      bool
}

func scanDisplaced(rows *sql.Rows) (displacedRow, error) {
	var d displacedRow
	err := rows.Scan(&d.machineID, &d.image, &d.spec, &d.runID, &d.head, &d.routesReplaced)
	return d, err
}

// Displaced gives the chain that an operation displaced, lowest first; nothing
// if it displaced none, or gave it back or up since.
func (c *Catalog) Displaced(ctx context.Context, opID string) ([]Layer, error) {
	return database.All(ctx, c.db, scanLayer, `SELECT `+layerColumns+`
		FROM displaced_layers d JOIN layers l ON l.id = d.layer_id WHERE d.operation_id = ? ORDER BY d.position`, opID)
}

// UndoReplace gives a machine back what the operation's ReplaceChain
// displaced: chain, spec, image, head, run id, and routes if they were
// replaced. The generation still grows, because work may have been admitted in
// between. The chain it had is unreferenced then. NOT_FOUND if nothing is displaced.
func (c *Catalog) UndoReplace(ctx context.Context, opID string) (generation uint64, err error) {
	err = c.db.Write(ctx, "undo-replace", func(t *database.Tx) error {
		missing := errdefs.New(errdefs.NotFound, "undo restore: operation %s displaced nothing", opID)
		d, err := database.One(ctx, t, missing, scanDisplaced, `SELECT machine_id, image_build_id, spec, run_id,
			coalesce((SELECT id FROM checkpoints WHERE id = head_checkpoint), ''), routes_replaced FROM displaced WHERE operation_id = ?`, opID)
		if err != nil {
			return err
		}
		m, err := machineOf(t, d.machineID)
		if err != nil {
			return err
		}
		generation = m.Generation + 1
		for _, s := range []struct {
			query string
			args  []any
		}{
			{`DELETE FROM chains WHERE machine_id = ?`, []any{m.ID}},
			{`INSERT INTO chains SELECT ?1, position, layer_id FROM displaced_layers WHERE operation_id = ?2`, []any{m.ID, opID}},
			{
				`UPDATE machines SET image_build_id = ?, spec = ?, run_id = ?, head_checkpoint = nullif(?, ''), generation = ? WHERE id = ?`,
				[]any{d.image, d.spec, d.runID, d.head, int64(generation), m.ID},
			},
		} {
			if err := t.Do(s.query, s.args...); err != nil {
				return err
			}
		}
		if d.routesReplaced {
			if err := undoRoutes(t, m.ID, opID); err != nil {
				return err
			}
		}
		return dropDisplaced(t, opID)
	})
	return generation, err
}

func undoRoutes(t *database.Tx, machineID, opID string) error {
	if err := t.Do(`DELETE FROM routes WHERE machine_id = ?`, machineID); err != nil {
		return err
	}
	return t.Do(`INSERT OR IGNORE INTO routes SELECT host, ?1, port, created_at FROM displaced_routes WHERE operation_id = ?2`, machineID, opID)
}

// DropDisplaced gives up what the operation displaced, before it ends.
func (c *Catalog) DropDisplaced(ctx context.Context, opID string) error {
	return c.db.Write(ctx, "drop-displaced", func(t *database.Tx) error { return dropDisplaced(t, opID) })
}

func dropDisplaced(t *database.Tx, opID string) error {
	for _, table := range []string{"displaced_layers", "displaced_routes", "displaced"} {
		if err := t.Do(`DELETE FROM `+table+` WHERE operation_id = ?`, opID); err != nil {
			return err
		}
	}
	return nil
}
