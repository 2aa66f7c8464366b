package rows

import (
	"context"
	"database/sql"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
)

const selectCheckpoint = `SELECT id, coalesce(machine_id, ''), coalesce(name, ''), kind, consistency, coalesce(parent, ''), message, automatic,
	spec, image_build_id, disk_bytes, session_id, prompt_id, tool_call_id, tool_name, transcript_offset, created_at,
	verification, problem, hook_failure FROM checkpoints `

func scanCheckpoint(rows *sql.Rows) (checkpoint.Checkpoint, error) {
	var (
		k       checkpoint.Checkpoint
		created int64
	)
	err := rows.Scan(&k.ID, &k.MachineID, &k.Name, &k.Kind, &k.Consistency, &k.Parent, &k.Message, &k.Automatic,
		&k.Spec, &k.ImageBuildID, &k.DiskBytes, &k.Origin.SessionID, &k.Origin.PromptID, &k.Origin.ToolCallID,
		&k.Origin.ToolName, &k.Origin.TranscriptOffset, &created, &k.Verification, &k.Problem, &k.HookFailure)
	k.CreatedAt = database.Time(created)
	return k, err
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

func scanPartFull(rows *sql.Rows) (part[*checkpoint.FullState], error) {
	p := part[*checkpoint.FullState]{value: &checkpoint.FullState{}}
	f := p.value
	err := rows.Scan(&p.checkpoint, &f.Devices, &f.MemoryBytes, &f.Tracking, &f.Platform, &f.LinkMagic, &f.Unconfigured)
	return p, err
}

// Checkpoints gives the checkpoints of the condition, newest first, in five
// queries however many they are.
func Checkpoints(ctx context.Context, q database.Querier, where string, args ...any) ([]checkpoint.Checkpoint, error) {
	list, err := database.All(ctx, q, scanCheckpoint, selectCheckpoint+where+` ORDER BY seq DESC`, args...)
	if err != nil {
		return nil, err
	}
	index := make(map[string]*checkpoint.Checkpoint, len(list))
	for i := range list {
		index[list[i].ID] = &list[i]
	}
	among := `WHERE checkpoint_id IN (SELECT id FROM checkpoints ` + where + `) ORDER BY 1`
	layers, err := database.All(ctx, q, scanPartLayer, `SELECT checkpoint_id, layer_id FROM checkpoint_layers `+among+`, position`, args...)
	if err != nil {
		return nil, err
	}
	for _, p := range layers {
		k := index[p.checkpoint]
		k.Layers = append(k.Layers, p.value)
	}
	routes, err := database.All(ctx, q, scanPartRoute, `SELECT checkpoint_id, host, port, listening FROM checkpoint_routes `+among+`, host`, args...)
	if err != nil {
		return nil, err
	}
	for _, p := range routes {
		k := index[p.checkpoint]
		k.Routes = append(k.Routes, p.value)
	}
	full, err := database.All(ctx, q, scanPartFull, `SELECT checkpoint_id, devices_layer, memory_bytes, tracking, platform, link_magic,
		unconfigured FROM checkpoint_full `+among, args...)
	if err != nil {
		return nil, err
	}
	for _, p := range full {
		index[p.checkpoint].Full = p.value
	}
	memory, err := database.All(ctx, q, scanPartLayer, `SELECT checkpoint_id, layer_id FROM checkpoint_memory `+among+`, position`, args...)
	if err != nil {
		return nil, err
	}
	for _, p := range memory {
		f := index[p.checkpoint].Full
		f.Memory = append(f.Memory, p.value)
	}
	return list, nil
}

// GetCheckpoint gives the checkpoint of an id, an image's booted one included;
// NOT_FOUND if there is none.
func GetCheckpoint(ctx context.Context, q database.Querier, id string) (checkpoint.Checkpoint, error) {
	list, err := Checkpoints(ctx, q, `WHERE id = ?`, id)
	if err == nil && len(list) == 0 {
		err = NoCheckpoint(id)
	}
	if err != nil {
		return checkpoint.Checkpoint{}, err
	}
	return list[0], nil
}

// NoCheckpoint is the error of a reference that no checkpoint answers to.
func NoCheckpoint(ref string) error { return NotFound("checkpoint", ref, "holdpoint checkpoint ls") }

// NoCheckpointOf is NoCheckpoint of one machine, or of any when machineID is empty.
func NoCheckpointOf(ctx context.Context, q database.Querier, machineID, ref string) error {
	missing := NoCheckpoint(ref)
	name, err := database.One(ctx, q, missing, database.Value[string], `SELECT name FROM machines WHERE id = ?`, machineID)
	if err != nil {
		return missing
	}
	return NotFound("checkpoint", ref, "holdpoint checkpoint ls "+name)
}

// InsertCheckpoint records a checkpoint and its parts.
func InsertCheckpoint(t *database.Tx, k checkpoint.Checkpoint) error {
	o := k.Origin
	if k.Verification == "" {
		k.Verification = checkpoint.Unverified
	}
	err := t.Do(`INSERT INTO checkpoints (id, machine_id, name, kind, consistency, parent, message, automatic, spec,
		image_build_id, disk_bytes, session_id, prompt_id, tool_call_id, tool_name, transcript_offset, created_at, verification, problem,
		hook_failure)
		VALUES (?, nullif(?, ''), nullif(?, ''), ?, ?, nullif(?, ''), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		k.ID, k.MachineID, k.Name, k.Kind, k.Consistency, k.Parent, k.Message, k.Automatic, database.JSON(k.Spec),
		k.ImageBuildID, k.DiskBytes, o.SessionID, o.PromptID, o.ToolCallID, o.ToolName, o.TranscriptOffset, t.OrNow(k.CreatedAt),
		k.Verification, k.Problem, database.OneLine(k.HookFailure))
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
	if k.Full == nil {
		return nil
	}
	return insertFull(t, k.ID, *k.Full)
}

func insertFull(t *database.Tx, id string, f checkpoint.FullState) error {
	err := t.Do(`INSERT INTO checkpoint_full VALUES (?, ?, ?, ?, ?, ?, ?)`, id, f.Devices, f.MemoryBytes, f.Tracking,
		database.JSON(f.Platform), f.LinkMagic, f.Unconfigured)
	if err != nil {
		return err
	}
	for i, layer := range f.Memory {
		if err := t.Do(`INSERT INTO checkpoint_memory VALUES (?, ?, ?)`, id, i, layer); err != nil {
			return err
		}
	}
	return nil
}

// DeleteCheckpoints drops the checkpoints of the condition with their parts and
// pools. Heads, standbys and what was used last are the caller's.
func DeleteCheckpoints(t *database.Tx, where string, args ...any) error {
	for _, table := range []string{"checkpoint_layers", "checkpoint_routes", "checkpoint_memory", "checkpoint_full", "pools", "image_boots"} {
		if err := t.Do(`DELETE FROM `+table+` WHERE checkpoint_id IN (SELECT id FROM checkpoints `+where+`)`, args...); err != nil {
			return err
		}
	}
	return t.Do(`DELETE FROM checkpoints `+where, args...)
}
