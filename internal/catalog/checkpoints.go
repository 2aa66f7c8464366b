package catalog

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const selectCheckpoint = `SELECT id, machine_id, coalesce(name, ''), kind, consistency, coalesce(parent, ''), message, automatic,
	spec, image_build_id, disk_bytes, session_id, prompt_id, tool_call_id, tool_name, transcript_offset, created_at FROM checkpoints `

func scanCheckpoint(rows *sql.Rows) (checkpoint.Checkpoint, error) {
	var (
		k       checkpoint.Checkpoint
		created int64
	)
	err := rows.Scan(&k.ID, &k.MachineID, &k.Name, &k.Kind, &k.Consistency, &k.Parent, &k.Message, &k.Automatic,
		&k.Spec, &k.ImageBuildID, &k.DiskBytes, &k.Origin.SessionID, &k.Origin.PromptID, &k.Origin.ToolCallID,
		&k.Origin.ToolName, &k.Origin.TranscriptOffset, &created)
	k.CreatedAt = database.Time(created)
	return k, err
}

// part is a row that belongs to a checkpoint.
type part[T any] struct {
	checkpoint string
	value      T
}

func scanPartLayer(rows *sql.Rows) (part[string], error) {
	var p part[string]
	err := rows.Scan(&p.checkpoint, &p.value)
	return p, err
}

func scanPartRoute(rows *sql.Rows) (part[checkpoint.Route], error) {
	var p part[checkpoint.Route]
	err := rows.Scan(&p.checkpoint, &p.value.Host, &p.value.Port, &p.value.Listening)
	return p, err
}

// readCheckpoints gives the checkpoints of the condition, newest first, in
// three queries however many they are.
func readCheckpoints(ctx context.Context, q database.Querier, where string, args ...any) ([]checkpoint.Checkpoint, error) {
	list, err := database.All(ctx, q, scanCheckpoint, selectCheckpoint+where+` ORDER BY seq DESC`, args...)
	if err != nil {
		return nil, err
	}
	among := `WHERE checkpoint_id IN (SELECT id FROM checkpoints ` + where + `)`
	layers, err := database.All(ctx, q, scanPartLayer, `SELECT checkpoint_id, layer_id FROM checkpoint_layers `+among+` ORDER BY 1, position`, args...)
	if err != nil {
		return nil, err
	}
	routes, err := database.All(ctx, q, scanPartRoute, `SELECT checkpoint_id, host, port, listening FROM checkpoint_routes `+among+` ORDER BY 1, host`, args...)
	if err != nil {
		return nil, err
	}
	index := make(map[string]int, len(list))
	for i, k := range list {
		index[k.ID] = i
	}
	for _, p := range layers {
		k := &list[index[p.checkpoint]]
		k.Layers = append(k.Layers, p.value)
	}
	for _, p := range routes {
		k := &list[index[p.checkpoint]]
		k.Routes = append(k.Routes, p.value)
	}
	return list, nil
}

func getCheckpoint(ctx context.Context, q database.Querier, id string) (checkpoint.Checkpoint, error) {
	list, err := readCheckpoints(ctx, q, `WHERE id = ?`, id)
	if err == nil && len(list) == 0 {
		err = noCheckpoint(id)
	}
	if err != nil {
		return checkpoint.Checkpoint{}, err
	}
	return list[0], nil
}

func noCheckpoint(ref string) error { return notFound("checkpoint", ref, "holdpoint checkpoint ls") }

// PublishCheckpoint makes a checkpoint visible: in one commit the layers in
// seal become sealed, the checkpoint is recorded with its layers and routes,
// the machine's head moves to it, and "last" means it. Its layers must be the
// lowest of the machine's chain and sealed by then. A name that another
// checkpoint of the machine has is ALREADY_EXISTS.
func (c *Catalog) PublishCheckpoint(ctx context.Context, k checkpoint.Checkpoint, seal []string) error {
	return c.db.Write(ctx, "publish-checkpoint", func(t *database.Tx) error {
		m, err := machineOf(t, k.MachineID)
		if err != nil {
			return err
		}
		if err := sealLayers(t, seal); err != nil {
			return err
		}
		if err := checkLayers(t, m, k); err != nil {
			return err
		}
		if err := insertCheckpoint(t, m, k); err != nil {
			return err
		}
		if err := t.Do(`UPDATE machines SET head_checkpoint = ? WHERE id = ?`, k.ID, m.ID); err != nil {
			return err
		}
		if err := setLast(t, "checkpoint", m.ID, k.ID); err != nil {
			return err
		}
		return setLast(t, "checkpoint", "", k.ID)
	})
}

// checkLayers refuses a checkpoint that could not be restored.
func checkLayers(t *database.Tx, m Machine, k checkpoint.Checkpoint) error {
	chain, err := chainOf(t.Ctx, t, m.ID)
	if err != nil {
		return err
	}
	if len(k.Layers) == 0 || len(k.Layers) > len(chain) {
		return fmt.Errorf("publish checkpoint %s: it has %d layers, its machine %q %d", k.ID, len(k.Layers), m.Name, len(chain))
	}
	for i, id := range k.Layers {
		if chain[i].ID != id || chain[i].State != LayerSealed {
			return fmt.Errorf("publish checkpoint %s: layer %s is not layer %d of machine %q and sealed", k.ID, id, i, m.Name)
		}
	}
	return nil
}

func insertCheckpoint(t *database.Tx, m Machine, k checkpoint.Checkpoint) error {
	o := k.Origin
	err := t.Do(`INSERT INTO checkpoints (id, machine_id, name, kind, consistency, parent, message, automatic, spec,
		image_build_id, disk_bytes, session_id, prompt_id, tool_call_id, tool_name, transcript_offset, created_at)
		VALUES (?, ?, nullif(?, ''), ?, ?, nullif(?, ''), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		k.ID, k.MachineID, k.Name, k.Kind, k.Consistency, k.Parent, k.Message, k.Automatic, database.JSON(k.Spec),
		k.ImageBuildID, k.DiskBytes, o.SessionID, o.PromptID, o.ToolCallID, o.ToolName, o.TranscriptOffset, t.OrNow(k.CreatedAt))
	if database.IsUnique(err) && k.Name != "" {
		return checkpointNameTaken(m.Name, k.Name)
	}
	if err != nil {
		return err
	}
	for i, id := range k.Layers {
		if err := t.Do(`INSERT INTO checkpoint_layers VALUES (?, ?, ?)`, k.ID, i, id); err != nil {
			return err
		}
	}
	for _, r := range k.Routes {
		if err := t.Do(`INSERT INTO checkpoint_routes VALUES (?, ?, ?, ?)`, k.ID, r.Host, r.Port, r.Listening); err != nil {
			return err
		}
	}
	return nil
}

func checkpointNameTaken(machineName, name string) error {
	return errdefs.New(errdefs.AlreadyExists, "create checkpoint %q of machine %q: the name is taken; choose another, or remove that one with: holdpoint checkpoint rm %s",
		name, machineName, name)
}

// CheckpointNameFree refuses a name that a checkpoint of the machine has
// (ALREADY_EXISTS), so that a capture need not begin; empty is free.
func (c *Catalog) CheckpointNameFree(ctx context.Context, m Machine, name string) error {
	if name == "" {
		return nil
	}
	list, err := database.All(ctx, c.db, database.Value[string], `SELECT id FROM checkpoints WHERE machine_id = ? AND name = ?`, m.ID, name)
	if err == nil && len(list) > 0 {
		err = checkpointNameTaken(m.Name, name)
	}
	return err
}

// GetCheckpoint gives the checkpoint of an id; NOT_FOUND if there is none.
func (c *Catalog) GetCheckpoint(ctx context.Context, id string) (k checkpoint.Checkpoint, err error) {
	err = c.db.View(ctx, func(q database.Querier) error {
		k, err = getCheckpoint(ctx, q, id)
		return err
	})
	return k, err
}

// ListCheckpoints gives the checkpoints of a machine, or of all when the id is
// empty, newest first.
func (c *Catalog) ListCheckpoints(ctx context.Context, machineID string) (list []checkpoint.Checkpoint, err error) {
	err = c.db.View(ctx, func(q database.Querier) error {
		list, err = readCheckpoints(ctx, q, `WHERE ?1 = '' OR machine_id = ?1`, machineID)
		return err
	})
	return list, err
}

// ForgetCheckpoint drops a checkpoint's record; its layers stay until they are
// collected. Its children become its parent's, and a head on it moves to its
// parent. A lease of another operation than opID is REFERENCED.
func (c *Catalog) ForgetCheckpoint(ctx context.Context, id, opID string) error {
	return c.db.Write(ctx, "forget-checkpoint", func(t *database.Tx) error {
		k, err := getCheckpoint(ctx, t, id)
		if err != nil {
			return err
		}
		if err := journal.RefuseLeased(t, CheckpointResource, id, opID, fmt.Sprintf("forget checkpoint %s", id)); err != nil {
			return err
		}
		for _, stmt := range []string{
			`UPDATE machines SET head_checkpoint = (SELECT id FROM checkpoints WHERE id = ?2) WHERE head_checkpoint = ?1`,
			`UPDATE displaced SET head_checkpoint = nullif(?2, '') WHERE head_checkpoint = ?1`,
			`UPDATE checkpoints SET parent = nullif(?2, '') WHERE parent = ?1`,
			`DELETE FROM last_used WHERE resource_id = ?1 AND ?2 = ?2`,
			`DELETE FROM checkpoint_layers WHERE checkpoint_id = ?1 AND ?2 = ?2`,
			`DELETE FROM checkpoint_routes WHERE checkpoint_id = ?1 AND ?2 = ?2`,
			`DELETE FROM checkpoints WHERE id = ?1 AND ?2 = ?2`,
		} {
			if err := t.Do(stmt, id, k.Parent); err != nil {
				return err
			}
		}
		return nil
	})
}
