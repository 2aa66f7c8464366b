// Package ready records what is kept ready so that a machine need not wait: the
// booted checkpoints of images, how many standbys a checkpoint is to have, and
// the standbys there are. It starts and ends no run, and makes no file; its
// tables live in the catalog's database.
package ready

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Register is the records of a database. Its methods may be called at the same time.
type Register struct{ db *database.DB }

// New returns a register in db, which is open.
func New(db *database.DB) *Register { return &Register{db: db} }

// Standby is a run that is loaded with a full checkpoint and has never run. Its
// life: its layer is staged by AddLayer; AddStandby records it; TakeStandby
// gives it to an operation, which makes it some machine's run, or DropStandby
// forgets it and its layer.
type Standby struct {
	RunID        string
	CheckpointID string
	// LayerID is the writable top of its disk, which nothing has written yet.
	LayerID string
	// CreatedAt is when it was recorded; AddStandby fills it in if it is zero.
	CreatedAt time.Time
}

const selectStandby = `SELECT run_id, checkpoint_id, layer_id, created_at FROM standbys `

func scanStandby(rows *sql.Rows) (Standby, error) {
	var (
		s       Standby
		created int64
	)
	err := rows.Scan(&s.RunID, &s.CheckpointID, &s.LayerID, &created)
	s.CreatedAt = database.Time(created)
	return s, err
}

// SetPool records how many standbys of a full checkpoint are to be ready; 0
// ends the pool. A disk checkpoint is a KIND_MISMATCH.
func (r *Register) SetPool(ctx context.Context, checkpointID string, count int) error {
	return r.db.Write(ctx, "set-pool", func(t *database.Tx) error {
		k, err := rows.GetCheckpoint(ctx, t, checkpointID)
		if err != nil {
			return err
		}
		if count <= 0 {
			return t.Do(`DELETE FROM pools WHERE checkpoint_id = ?`, checkpointID)
		}
		if k.Full == nil {
			return errdefs.New(errdefs.KindMismatch, "keep standbys of checkpoint %s: it has no memory to continue; choose one of kind full", checkpointID)
		}
		return t.Do(`INSERT INTO pools VALUES (?, ?) ON CONFLICT DO UPDATE SET count = excluded.count`, checkpointID, count)
	})
}

// Pools gives how many standbys are to be ready, by checkpoint.
func (r *Register) Pools(ctx context.Context) (map[string]int, error) {
	type pool struct {
		id    string
		count int
	}
	list, err := database.All(ctx, r.db, func(rows *sql.Rows) (p pool, err error) {
		return p, rows.Scan(&p.id, &p.count)
	}, `SELECT checkpoint_id, count FROM pools`)
	pools := make(map[string]int, len(list))
	for _, p := range list {
		pools[p.id] = p.count
	}
	return pools, err
}

// AddStandby records a standby that is ready. Its layer was staged by AddLayer
// and is kept for it from then on, whether or not that operation ends.
func (r *Register) AddStandby(ctx context.Context, s Standby) error {
	return r.db.Write(ctx, "add-standby", func(t *database.Tx) error {
		k, err := rows.GetCheckpoint(ctx, t, s.CheckpointID)
		if err != nil {
			return err
		}
		if k.Full == nil {
			return errdefs.New(errdefs.KindMismatch, "record standby %s: checkpoint %s has no memory to continue", s.RunID, s.CheckpointID)
		}
		if _, err := rows.GetLayer(ctx, t, s.LayerID); err != nil {
			return err
		}
		err = t.Do(`INSERT INTO standbys VALUES (?, ?, ?, ?)`, s.RunID, s.CheckpointID, s.LayerID, t.OrNow(s.CreatedAt))
		if database.IsUnique(err) {
			return errdefs.New(errdefs.AlreadyExists, "record standby %s: it or its layer %s is recorded already", s.RunID, s.LayerID)
		}
		return err
	})
}

// TakeStandby takes the oldest standby of a checkpoint out of the pool and
// leases its layer to the operation; false if there is none.
func (r *Register) TakeStandby(ctx context.Context, opID, checkpointID string) (s Standby, found bool, err error) {
	list, err := r.Standbys(ctx, checkpointID)
	if err != nil || len(list) == 0 { // most checkpoints have none: no write for them
		return Standby{}, false, err
	}
	err = r.db.Write(ctx, "take-standby", func(t *database.Tx) error {
		list, err := database.All(ctx, t, scanStandby, selectStandby+`WHERE checkpoint_id = ? ORDER BY created_at, run_id LIMIT 1`, checkpointID)
		if err != nil || len(list) == 0 {
			return err
		}
		s, found = list[0], true
		if err := t.Do(`DELETE FROM standbys WHERE run_id = ?`, s.RunID); err != nil {
			return err
		}
		return rows.LeaseLayer(t, opID, s.LayerID)
	})
	if err != nil {
		return Standby{}, false, err
	}
	return s, found, nil
}

// DropStandby forgets a standby whose run has ended; one that is not there is
// no error.
func (r *Register) DropStandby(ctx context.Context, runID string) error {
	return r.db.Write(ctx, "drop-standby", func(t *database.Tx) error {
		return t.Do(`DELETE FROM standbys WHERE run_id = ?`, runID)
	})
}

// Standbys gives the standbys of a checkpoint, or all when the id is empty,
// oldest first.
func (r *Register) Standbys(ctx context.Context, checkpointID string) ([]Standby, error) {
	return database.All(ctx, r.db, scanStandby, selectStandby+`WHERE ?1 = '' OR checkpoint_id = ?1 ORDER BY created_at, run_id`, checkpointID)
}

// RefuseStandbys refuses, as REFERENCED, to do what while checkpoints of the
// condition have standbys.
func RefuseStandbys(t *database.Tx, what, where string, args ...any) error {
	list, err := database.All(t.Ctx, t, scanStandby, selectStandby+
		`WHERE checkpoint_id IN (SELECT id FROM checkpoints `+where+`) ORDER BY created_at`, args...)
	if err != nil || len(list) == 0 {
		return err
	}
	return errdefs.New(errdefs.Referenced, "%s: %d standbys of checkpoint %s are ready; end them with: holdpoint checkpoint pool %s 0",
		what, len(list), list[0].CheckpointID, list[0].CheckpointID)
}

// ImageBoot gives the booted checkpoint of an image for a shape of machine;
// NOT_FOUND if there is none.
func (r *Register) ImageBoot(ctx context.Context, buildID, shape string) (k checkpoint.Checkpoint, err error) {
	err = r.db.View(ctx, func(q database.Querier) error {
		missing := errdefs.New(errdefs.NotFound, "find booted checkpoint of image %s: there is none for this shape of machine", buildID)
		id, err := database.One(ctx, q, missing, database.Value[string],
			`SELECT checkpoint_id FROM image_boots WHERE build_id = ? AND shape = ?`, buildID, shape)
		if err != nil {
			return err
		}
		k, err = rows.GetCheckpoint(ctx, q, id)
		return err
	})
	return k, err
}

// ImageBoots gives the booted checkpoints of an image, or of all when the
// build id is empty, newest first.
func (r *Register) ImageBoots(ctx context.Context, buildID string) (list []checkpoint.Checkpoint, err error) {
	err = r.db.View(ctx, func(q database.Querier) error {
		list, err = rows.Checkpoints(ctx, q, `WHERE machine_id IS NULL AND (?1 = '' OR image_build_id = ?1)`, buildID)
		return err
	})
	return list, err
}

// DropImageBoot forgets a booted checkpoint; machines that continued from it
// keep the layers they need. One that an operation leases, or that has
// standbys, is REFERENCED; one that is not there is NOT_FOUND.
func (r *Register) DropImageBoot(ctx context.Context, checkpointID string) error {
	return r.db.Write(ctx, "drop-image-boot", func(t *database.Tx) error {
		_, err := database.One(ctx, t, rows.NoCheckpoint(checkpointID), database.Value[string],
			`SELECT build_id FROM image_boots WHERE checkpoint_id = ?`, checkpointID)
		if err != nil {
			return err
		}
		return DropBoots(t, fmt.Sprintf("drop booted checkpoint %s", checkpointID), "", `id = ?`, checkpointID)
	})
}

// DropBoots forgets the booted checkpoints of the condition. One that another
// operation than opID leases, or that has standbys, is REFERENCED.
func DropBoots(t *database.Tx, what, opID, condition string, arg any) error {
	where := `WHERE machine_id IS NULL AND ` + condition
	ids, err := database.All(t.Ctx, t, database.Value[string], `SELECT id FROM checkpoints `+where+` ORDER BY seq`, arg)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := journal.RefuseLeased(t, journal.Checkpoint, id, opID, what); err != nil {
			return err
		}
	}
	if err := RefuseStandbys(t, what, where, arg); err != nil {
		return err
	}
	return rows.DeleteCheckpoints(t, where, arg)
}

// MemoryFilesInUse gives the top memory layers whose memory files runs map: of
// machines, also such that a restore has displaced, of standbys, and of what
// running operations lease, which may be about to.
func (r *Register) MemoryFilesInUse(ctx context.Context) ([]string, error) {
	return database.All(ctx, r.db, database.Value[string], `
		SELECT memory_file FROM machines WHERE memory_file <> ''
		UNION SELECT memory_file FROM displaced WHERE memory_file <> ''
		UNION SELECT layer_id FROM checkpoint_memory m
			WHERE position = (SELECT max(position) FROM checkpoint_memory WHERE checkpoint_id = m.checkpoint_id)
			AND (checkpoint_id IN (SELECT checkpoint_id FROM standbys)
				OR checkpoint_id IN (SELECT resource_id FROM leases WHERE kind = 'checkpoint'))
		ORDER BY 1`)
}
