package catalog

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// ReplaceChain is what a restore changes in the catalog.
type ReplaceChain struct {
	MachineID string
	// OperationID is the restore; what it displaces is kept under its id.
	OperationID string
	// CheckpointID is a checkpoint of the machine; the new chain is its layers and Top.
	CheckpointID string
	// Top is the new writable layer; it may have been staged by AddLayer or be
	// that of a standby.
	Top Layer
	// RunID is set when a run on the new chain answers already: Top is live
	// and the machine running then.
	RunID string
	// Full: the run continues the checkpoint's memory; else it boots.
	Full bool
	// RestoreRoutes puts the machine's routes back to those of the
	// checkpoint. A host name that is another machine's by now stays there.
	RestoreRoutes bool
}

// ReplaceChain puts a machine's disk, spec and image back to a checkpoint in
// one commit, and with Full its memory, and keeps what that displaces until the
// operation ends. It returns the new generation.
func (c *Catalog) ReplaceChain(ctx context.Context, r ReplaceChain) (generation uint64, err error) {
	err = c.db.Write(ctx, "replace-chain", func(t *database.Tx) error {
		m, err := machineOf(t, r.MachineID)
		if err != nil {
			return err
		}
		ck, err := rows.GetCheckpoint(ctx, t, r.CheckpointID)
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
		if err := installMemory(t, m, ck, r.Full); err != nil {
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
		if err == nil {
			err = rows.UseCheckpoint(t, m.ID, ck)
		}
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

// installChain makes layers and top a machine's chain; a raw top is all of it.
func installChain(t *database.Tx, machineID string, layers []string, top Layer) error {
	layers, err := rows.Below(t, layers, top)
	if err != nil {
		return err
	}
	if err := t.Do(`DELETE FROM chains WHERE machine_id = ?`, machineID); err != nil {
		return err
	}
	if err := recordTop(t, machineID, top); err != nil {
		return err
	}
	for _, id := range append(append([]string{}, layers...), top.ID) {
		if err := rows.PushLayer(t, machineID, id); err != nil {
			return fmt.Errorf("record chain of machine %s: %w", machineID, err)
		}
	}
	return nil
}

// recordTop records a layer that is to be a machine's top, or makes one that
// was staged, or is a standby's, the machine's.
func recordTop(t *database.Tx, machineID string, top Layer) error {
	staged, err := rows.GetLayer(t.Ctx, t, top.ID)
	if errdefs.Is(err, errdefs.NotFound) {
		return rows.InsertLayer(t, top)
	}
	if err != nil {
		return err
	}
	used, err := rows.InChain(t, top.ID)
	switch {
	case err != nil:
		return err
	case staged.State == LayerSealed:
		return errdefs.New(errdefs.WrongState, "record chain of machine %s: layer %s is sealed and cannot be the top", machineID, top.ID)
	case used:
		return errdefs.New(errdefs.AlreadyExists, "record chain of machine %s: layer %s is in a chain already", machineID, top.ID)
	}
	return t.Do(`UPDATE layers SET machine_id = ? WHERE id = ?`, machineID, top.ID)
}

// installMemory makes the memory of a checkpoint the machine's, or none.
func installMemory(t *database.Tx, m Machine, ck checkpoint.Checkpoint, full bool) error {
	if !full {
		return rows.SetMachineMemory(t, m.ID, nil, "", "")
	}
	if ck.Full == nil {
		return errdefs.New(errdefs.KindMismatch, "continue machine %q from checkpoint %s: it is of the disk only; restore its disk", m.Name, ck.ID)
	}
	return rows.SetMachineMemory(t, m.ID, ck.Full.Memory, ck.ID, topOf(ck))
}

// topOf is the id of a full checkpoint's own memory layer.
func topOf(ck checkpoint.Checkpoint) string { return ck.Full.Memory[len(ck.Full.Memory)-1] }

// displace keeps what a restore takes from a machine.
func displace(t *database.Tx, m Machine, r ReplaceChain) error {
	err := t.Do(`INSERT INTO displaced SELECT ?1, id, image_build_id, spec, run_id, head_checkpoint, ?3, memory_head, memory_file,
		state = 'suspended' FROM machines WHERE id = ?2`, r.OperationID, m.ID, r.RestoreRoutes)
	if database.IsUnique(err) {
		return errdefs.New(errdefs.WrongState, "restore machine %q: operation %s has restored it already", m.Name, r.OperationID)
	}
	if err != nil {
		return err
	}
	for _, stmt := range []string{
		`INSERT INTO displaced_layers SELECT ?1, position, layer_id FROM chains WHERE machine_id = ?2`,
		`INSERT INTO displaced_memory SELECT ?1, position, layer_id FROM machine_memory WHERE machine_id = ?2`,
		`INSERT INTO displaced_routes SELECT ?1, host, port, created_at FROM routes WHERE machine_id = ?2`,
	} {
		if err := t.Do(stmt, r.OperationID, m.ID); err != nil {
			return err
		}
	}
	return nil
}

type displacedRow struct {
	machineID, image, spec, runID, head string
	memoryHead, memoryFile              string
	routesReplaced, suspended           bool
}

func scanDisplaced(rows *sql.Rows) (displacedRow, error) {
	var d displacedRow
	err := rows.Scan(&d.machineID, &d.image, &d.spec, &d.runID, &d.head, &d.routesReplaced, &d.memoryHead, &d.memoryFile, &d.suspended)
	return d, err
}

// Displaced gives the chain that an operation displaced, lowest first; nothing
// if it displaced none, or gave it back or up since.
func (c *Catalog) Displaced(ctx context.Context, opID string) ([]Layer, error) {
	return rows.Displaced(ctx, c.db, opID)
}

// UndoReplace gives a machine back what the operation's ReplaceChain
// displaced: chain, memory, spec, image, head, run id, and routes if they were
// replaced; one that was suspended is so again, the state of others stays. The
// generation still grows, because work may have been admitted in between. The
// chain it had is unreferenced then. NOT_FOUND if nothing is displaced.
func (c *Catalog) UndoReplace(ctx context.Context, opID string) (generation uint64, err error) {
	err = c.db.Write(ctx, "undo-replace", func(t *database.Tx) error {
		missing := errdefs.New(errdefs.NotFound, "undo restore: operation %s displaced nothing", opID)
		d, err := database.One(ctx, t, missing, scanDisplaced, `SELECT machine_id, image_build_id, spec, run_id,
			coalesce((SELECT id FROM checkpoints WHERE id = head_checkpoint), ''), routes_replaced, memory_head, memory_file, suspended
			FROM displaced WHERE operation_id = ?`, opID)
		if err != nil {
			return err
		}
		m, err := machineOf(t, d.machineID)
		if err != nil {
			return err
		}
		generation = m.Generation + 1
		if d.suspended {
			m.State = machine.Suspended
		}
		for _, s := range []struct {
			query string
			args  []any
		}{
			{`DELETE FROM chains WHERE machine_id = ?`, []any{m.ID}},
			{`INSERT INTO chains SELECT ?1, position, layer_id FROM displaced_layers WHERE operation_id = ?2`, []any{m.ID, opID}},
			{`DELETE FROM machine_memory WHERE machine_id = ?`, []any{m.ID}},
			{`INSERT INTO machine_memory SELECT ?1, position, layer_id FROM displaced_memory WHERE operation_id = ?2`, []any{m.ID, opID}},
			{
				`UPDATE machines SET image_build_id = ?, spec = ?, run_id = ?, head_checkpoint = nullif(?, ''), generation = ?,
				memory_head = ?, memory_file = ?, state = ? WHERE id = ?`,
				[]any{d.image, d.spec, d.runID, d.head, int64(generation), d.memoryHead, d.memoryFile, m.State, m.ID},
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
	for _, table := range []string{"displaced_layers", "displaced_memory", "displaced_routes", "displaced"} {
		if err := t.Do(`DELETE FROM `+table+` WHERE operation_id = ?`, opID); err != nil {
			return err
		}
	}
	return nil
}
