package catalog

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/catalog/reference"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Last is the reference that means what was used last.
const Last = "last"

// ResolveMachine finds the machine that a person means by an exact name or id,
// an unambiguous prefix of either, or "last". None is NOT_FOUND, more than one
// INVALID with the candidates.
func (c *Catalog) ResolveMachine(ctx context.Context, ref string) (m Machine, err error) {
	if ref == "" {
		return m, reference.Empty("machine")
	}
	err = c.db.View(ctx, func(q database.Querier) error {
		id := ""
		if ref == Last {
			if id, err = rows.LastUsed(ctx, q, "machine", ""); err != nil {
				return err
			}
		} else {
			list, err := database.All(ctx, q, reference.Scan, `SELECT id, name, id, '' FROM machines WHERE `+reference.Matches("name", "id")+` ORDER BY name`, ref)
			if err != nil {
				return err
			}
			found, err := reference.Choose("machine", ref, list, func() error { return noMachine(ref) })
			if err != nil {
				return err
			}
			id = found.ID
		}
		if m, err = getMachine(ctx, q, c.now().UnixNano(), id); errdefs.Is(err, errdefs.NotFound) {
			err = noMachine(ref)
		}
		return err
	})
	return m, err
}

// ResolveImage finds an image by name or build id, like ResolveMachine; there
// is no "last" of images.
func (c *Catalog) ResolveImage(ctx context.Context, ref string) (i Image, err error) {
	if ref == "" {
		return i, reference.Empty("image")
	}
	err = c.db.View(ctx, func(q database.Querier) error {
		list, err := database.All(ctx, q, reference.Scan, `SELECT build_id, coalesce(name, ''), '', '' FROM images
			WHERE `+reference.Matches("coalesce(name, '')", "build_id")+` ORDER BY 2, 1`, ref)
		if err != nil {
			return err
		}
		found, err := reference.Choose("image", ref, list, func() error { return rows.NoImageYet(ctx, q, ref) })
		if err != nil {
			return err
		}
		i, err = database.One(ctx, q, rows.NoImage(ref), scanImage, selectImage+`WHERE i.build_id = ?`, found.ID)
		return err
	})
	return i, err
}

// ResolveOperation finds an operation by id or prefix of it.
func (c *Catalog) ResolveOperation(ctx context.Context, ref string) (Operation, error) {
	if ref == "" {
		return Operation{}, reference.Empty("operation")
	}
	list, err := database.All(ctx, c.db, reference.Scan, `SELECT id, '', '', '' FROM operations WHERE `+reference.Matches("id", "id")+` ORDER BY seq DESC`, ref)
	if err != nil {
		return Operation{}, err
	}
	found, err := reference.Choose("operation", ref, list, func() error { return journal.NotFound(ref) })
	if err != nil {
		return Operation{}, err
	}
	return c.GetOperation(ctx, found.ID)
}

// ResolveCheckpoint finds a checkpoint of a machine, or of any when machineID
// is empty, like ResolveMachine. "last" is the one used last; where none was
// used, or that one is gone or has failed verification, the newest that has not.
// A reference that only another machine's checkpoint answers to is INVALID and
// names that machine: restoring it would be a fork.
func (c *Catalog) ResolveCheckpoint(ctx context.Context, machineID, ref string) (k checkpoint.Checkpoint, err error) {
	if ref == "" {
		return k, reference.Empty("checkpoint")
	}
	err = c.db.View(ctx, func(q database.Querier) error {
		var id string
		if ref == Last {
			id, err = lastCheckpoint(ctx, q, machineID)
		} else {
			id, err = findCheckpoint(ctx, q, machineID, ref)
		}
		if err == nil {
			k, err = rows.GetCheckpoint(ctx, q, id)
		}
		if errdefs.Is(err, errdefs.NotFound) {
			err = rows.NoCheckpointOf(ctx, q, machineID, ref)
		}
		return err
	})
	return k, err
}

func lastCheckpoint(ctx context.Context, q database.Querier, machineID string) (string, error) {
	id, err := rows.LastUsed(ctx, q, "checkpoint", machineID)
	if err != nil || id != "" {
		return id, err
	}
	return database.One(ctx, q, rows.NoCheckpoint(Last), database.Value[string], `SELECT id FROM checkpoints
		WHERE machine_id IS NOT NULL AND (?1 = '' OR machine_id = ?1)
		AND verification <> 'failed'
		ORDER BY automatic, seq DESC LIMIT 1`, machineID)
}

func findCheckpoint(ctx context.Context, q database.Querier, machineID, ref string) (string, error) {
	list, err := database.All(ctx, q, reference.Scan, `SELECT k.id, coalesce(k.name, ''), k.machine_id, m.name
		FROM checkpoints k JOIN machines m ON m.id = k.machine_id
		WHERE `+reference.Matches("coalesce(k.name, '')", "k.id")+` ORDER BY m.name, k.seq`, ref)
	if err != nil {
		return "", err
	}
	var own, foreign []reference.Candidate
	for _, c := range list {
		if machineID == "" || c.MachineID == machineID {
			own = append(own, c)
		} else {
			foreign = append(foreign, c)
		}
	}
	found, err := reference.Choose("checkpoint", ref, own, func() error { return rows.NoCheckpoint(ref) })
	if len(own) > 0 || len(foreign) == 0 {
		return found.ID, err
	}
	return "", errdefs.New(errdefs.Invalid, "find checkpoint %q: it belongs to machine %q; choose one of this machine's, see holdpoint checkpoint ls",
		ref, foreign[0].Machine)
}
