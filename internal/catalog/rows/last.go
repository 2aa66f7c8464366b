package rows

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
)

// SetLast makes "last" of a kind mean a resource; scope is empty for the whole
// home, or a machine's id.
func SetLast(t *database.Tx, kind, scope, id string) error {
	return t.Do(`INSERT INTO last_used VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET resource_id = excluded.resource_id`, kind, scope, id)
}

// UseCheckpoint makes "last" mean a checkpoint, in the home and in its machine,
// but for one that nobody asked for: what a restore keeps, or a suspension.
func UseCheckpoint(t *database.Tx, machineID string, k checkpoint.Checkpoint) error {
	if k.Automatic {
		return nil
	}
	if err := SetLast(t, "checkpoint", machineID, k.ID); err != nil {
		return err
	}
	return SetLast(t, "checkpoint", "", k.ID)
}

// LastUsed is the id of what "last" means, empty when nothing was used yet.
func LastUsed(ctx context.Context, q database.Querier, kind, scope string) (string, error) {
	list, err := database.All(ctx, q, database.Value[string], `SELECT resource_id FROM last_used WHERE kind = ? AND scope = ?`, kind, scope)
	if err != nil || len(list) == 0 {
		return "", err
	}
	return list[0], nil
}
