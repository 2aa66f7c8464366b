package catalog

import (
	"context"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/catalog/ready"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// PublishCheckpoint makes a checkpoint visible: in one commit the layers in
// seal become sealed, the checkpoint is recorded with its layers and routes,
// the machine's head moves to it, and "last" means it. Its layers must be the
// lowest of the machine's chain and sealed by then; of a machine with a raw disk
// it has one, a copy of that. A name that another checkpoint of the machine has
// is ALREADY_EXISTS.
//
// A full or frozen one has all of the chain but the top, which its run has switched
// to and which is live then. The memory of a full one is either one layer or that of the machine
// with one layer more, and becomes the machine's; that layer and the one with
// the devices are sealed. measured are sealed layers whose size and digest are
// recorded in the same commit.
func (c *Catalog) PublishCheckpoint(ctx context.Context, k checkpoint.Checkpoint, seal []string, measured ...Measured) error {
	return c.db.Write(ctx, "publish-checkpoint", func(t *database.Tx) error {
		m, err := machineOf(t, k.MachineID)
		if err != nil {
			return err
		}
		if err := publish(t, m, k, seal, measured); err != nil {
			return err
		}
		if err := t.Do(`UPDATE machines SET head_checkpoint = ? WHERE id = ?`, k.ID, m.ID); err != nil {
			return err
		}
		return rows.UseCheckpoint(t, m.ID, k)
	})
}

// PublishImageBoot records k, taken of the present run of a machine as a full
// checkpoint is, as the booted checkpoint of its image for a shape of machine.
// It belongs to no machine and no list shows it: the machine's memory is as
// after PublishCheckpoint, its head stays. An image has one for each shape: a
// second one is ALREADY_EXISTS.
func (c *Catalog) PublishImageBoot(ctx context.Context, shape string, k checkpoint.Checkpoint, seal []string, machineID string, measured ...Measured) error {
	return c.db.Write(ctx, "publish-image-boot", func(t *database.Tx) error {
		m, err := machineOf(t, machineID)
		if err != nil {
			return err
		}
		if k.Full == nil || k.ImageBuildID != m.ImageBuildID {
			return errdefs.New(errdefs.KindMismatch, "publish boot of image %s: checkpoint %s is not a full one of a machine of it", k.ImageBuildID, k.ID)
		}
		k.MachineID, k.Parent, k.Name = "", "", ""
		if err := publish(t, m, k, seal, measured); err != nil {
			return err
		}
		err = t.Do(`INSERT INTO image_boots VALUES (?, ?, ?)`, k.ImageBuildID, shape, k.ID)
		if database.IsUnique(err) {
			return errdefs.New(errdefs.AlreadyExists, "publish boot of image %s: it has one for this shape of machine already", k.ImageBuildID)
		}
		return err
	})
}

func publish(t *database.Tx, m Machine, k checkpoint.Checkpoint, seal []string, measured []Measured) error {
	if k.Full != nil {
		if err := checkMemory(t, m, k); err != nil {
			return err
		}
		seal = append([]string{topOf(k), k.Full.Devices}, seal...)
		measured = append([]Measured{{ID: topOf(k), Bytes: k.Full.MemoryBytes}}, measured...)
	}
	if err := rows.SealLayers(t, seal...); err != nil {
		return err
	}
	if err := rows.Measure(t, measured...); err != nil {
		return err
	}
	if err := rows.CheckDisk(t, m.ID, m.Name, k); err != nil {
		return err
	}
	err := rows.InsertCheckpoint(t, k)
	if database.IsUnique(err) && k.Name != "" {
		return checkpointNameTaken(m.Name, k.Name)
	}
	if err == nil && k.Full != nil {
		err = rows.SetMachineMemory(t, m.ID, k.Full.Memory, k.ID, m.MemoryFile)
	}
	if err != nil || k.Full == nil && k.Consistency != checkpoint.Frozen {
		return err
	}
	return wakeTop(t, m) // the machine has gone on
}

// checkMemory refuses a checkpoint whose memory could not be restored.
func checkMemory(t *database.Tx, m Machine, k checkpoint.Checkpoint) error {
	chain, err := rows.MachineMemory(t.Ctx, t, m.ID)
	if err != nil {
		return err
	}
	n := len(k.Full.Memory) - 1
	if n > 0 && len(chain) == 0 {
		return errdefs.New(errdefs.WrongState, "checkpoint of machine %q: its run ended meanwhile, and nothing was kept; start it and try again", m.Name)
	}
	if k.Kind != checkpoint.Full || n < 0 || n > 0 && n != len(chain) {
		return fmt.Errorf("publish checkpoint %s: it has %d memory layers, its machine %q %d", k.ID, n+1, m.Name, len(chain))
	}
	for i, id := range k.Full.Memory[:n] {
		if chain[i].ID != id || chain[i].State != LayerSealed {
			return fmt.Errorf("publish checkpoint %s: memory layer %s is not layer %d of machine %q and sealed", k.ID, id, i, m.Name)
		}
	}
	for _, own := range [][2]string{{topOf(k), MemoryFormat}, {k.Full.Devices, DevicesFormat}} {
		l, err := rows.GetLayer(t.Ctx, t, own[0])
		if err != nil {
			return err
		}
		if l.Format != own[1] || l.State != LayerCreated {
			return fmt.Errorf("publish checkpoint %s: layer %s is not a new one of format %s but %s %s", k.ID, l.ID, own[1], l.State, l.Format)
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

// GetCheckpoint gives the checkpoint of an id, an image's booted one included;
// NOT_FOUND if there is none.
func (c *Catalog) GetCheckpoint(ctx context.Context, id string) (k checkpoint.Checkpoint, err error) {
	err = c.db.View(ctx, func(q database.Querier) error {
		k, err = rows.GetCheckpoint(ctx, q, id)
		return err
	})
	return k, err
}

// ListCheckpoints gives the checkpoints of a machine, or of all machines when
// the id is empty, newest first.
func (c *Catalog) ListCheckpoints(ctx context.Context, machineID string) ([]checkpoint.Checkpoint, error) {
	return c.checkpoints(ctx, `WHERE machine_id IS NOT NULL AND (?1 = '' OR machine_id = ?1)`, machineID)
}

// UnverifiedCheckpoints gives the full checkpoints of machines that no restore
// aside has tried yet, newest first.
func (c *Catalog) UnverifiedCheckpoints(ctx context.Context) ([]checkpoint.Checkpoint, error) {
	return c.checkpoints(ctx, `WHERE machine_id IS NOT NULL AND kind = 'full' AND verification = 'unverified'`)
}

func (c *Catalog) checkpoints(ctx context.Context, where string, args ...any) (list []checkpoint.Checkpoint, err error) {
	err = c.db.View(ctx, func(q database.Querier) error {
		list, err = rows.Checkpoints(ctx, q, where, args...)
		return err
	})
	return list, err
}

// SetVerification records whether a checkpoint was found sound, and if not, why.
// One that failed is not what "last" means any more.
func (c *Catalog) SetVerification(ctx context.Context, id string, v checkpoint.Verification, problem string) error {
	return c.db.Write(ctx, "set-verification", func(t *database.Tx) error {
		err := t.DoOne(rows.NoCheckpoint(id), `UPDATE checkpoints SET verification = ?, problem = ? WHERE id = ?`,
			v, database.OneLine(problem), id)
		if err != nil || v != checkpoint.Failed {
			return err
		}
		return t.Do(`DELETE FROM last_used WHERE kind = 'checkpoint' AND resource_id = ?`, id)
	})
}

// ForgetCheckpoint drops a checkpoint's record and its pool; its layers stay
// until they are collected. Its children become its parent's, and a head on it
// moves to its parent. REFERENCED: a lease of another operation than opID, the
// head of a suspended machine, standbys that have not been ended.
func (c *Catalog) ForgetCheckpoint(ctx context.Context, id, opID string) error {
	return c.db.Write(ctx, "forget-checkpoint", func(t *database.Tx) error {
		k, err := rows.GetCheckpoint(ctx, t, id)
		if err == nil && k.MachineID == "" {
			err = rows.NoCheckpoint(id)
		}
		if err != nil {
			return err
		}
		what := fmt.Sprintf("forget checkpoint %s", id)
		if err := journal.RefuseLeased(t, CheckpointResource, id, opID, what); err != nil {
			return err
		}
		if err := refuseSuspended(t, what, id); err != nil {
			return err
		}
		if err := ready.RefuseStandbys(t, what, `WHERE id = ?`, id); err != nil {
			return err
		}
		for _, stmt := range []string{
			`UPDATE machines SET head_checkpoint = (SELECT id FROM checkpoints WHERE id = ?2) WHERE head_checkpoint = ?1`,
			`UPDATE displaced SET head_checkpoint = nullif(?2, '') WHERE head_checkpoint = ?1`,
			`UPDATE checkpoints SET parent = nullif(?2, '') WHERE parent = ?1`,
			`DELETE FROM last_used WHERE resource_id = ?1 AND ?2 = ?2`,
		} {
			if err := t.Do(stmt, id, k.Parent); err != nil {
				return err
			}
		}
		return rows.DeleteCheckpoints(t, `WHERE id = ?`, id)
	})
}

// refuseSuspended refuses to lose what a suspended machine goes on from, also
// one that a restore has displaced.
func refuseSuspended(t *database.Tx, what, id string) error {
	names, err := database.All(t.Ctx, t, database.Value[string], `SELECT name FROM machines WHERE state = 'suspended' AND head_checkpoint = ?1
		UNION SELECT m.name FROM displaced d JOIN machines m ON m.id = d.machine_id WHERE d.suspended AND d.head_checkpoint = ?1
		ORDER BY 1`, id)
	if err == nil && len(names) > 0 {
		err = errdefs.New(errdefs.Referenced, "%s: machine %q is suspended in it; resume it first: holdpoint resume %s", what, names[0], names[0])
	}
	return err
}
