package catalog

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

const selectMachine = `SELECT m.id, m.name, m.image_build_id, m.spec, m.state, m.generation, m.run_id,
	m.exit, m.link_magic, coalesce(m.head_checkpoint, ''), m.created_at,
	coalesce((SELECT l.operation_id FROM leases l WHERE l.kind = 'machine' AND l.resource_id = m.id
		AND l.exclusive AND l.expires_at > ?1 LIMIT 1), ''),
	(SELECT count(*) FROM chains c WHERE c.machine_id = m.id)
	FROM machines m `

func scanMachine(rows *sql.Rows) (Machine, error) {
	var (
		m       Machine
		spec    []byte
		created int64
	)
	err := rows.Scan(&m.ID, &m.Name, &m.ImageBuildID, &spec, &m.State, &m.Generation, &m.RunID,
		&m.Exit, &m.LinkMagic, &m.Head, &created, &m.HeldBy, &m.ChainLength)
	if err != nil {
		return m, err
	}
	m.CreatedAt = database.Time(created)
	if err := json.Unmarshal(spec, &m.Spec); err != nil {
		return m, errdefs.New(errdefs.Storage, "read spec of machine %q: %w", m.Name, err)
	}
	return m, nil
}

// CreateMachine records a machine and the first layer of its disk, which
// exists, as the top of its chain; "last" means it from then on. A taken name
// is ALREADY_EXISTS.
func (c *Catalog) CreateMachine(ctx context.Context, m Machine, first Layer) error {
	spec, err := json.Marshal(m.Spec)
	if err != nil {
		return fmt.Errorf("record machine %q: %w", m.Name, err)
	}
	return c.db.Write(ctx, "create-machine", func(t *database.Tx) error {
		if err := requireImage(t, m.ImageBuildID); err != nil {
			return err
		}
		err := t.Do(`INSERT INTO machines VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, ?)`,
			m.ID, m.Name, m.ImageBuildID, string(spec), m.State, int64(m.Generation), m.RunID,
			m.Exit, m.LinkMagic, t.OrNow(m.CreatedAt))
		if database.IsUnique(err) {
			return errdefs.New(errdefs.AlreadyExists,
				"create machine %q: the name is taken; choose another, or remove that machine with: holdpoint rm %s", m.Name, m.Name)
		}
		if err != nil {
			return err
		}
		if err := insertLayer(t, first); err != nil {
			return err
		}
		if err := pushLayer(t, m.ID, first.ID); err != nil {
			return err
		}
		return setLast(t, "machine", "", m.ID)
	})
}

// ListMachines gives all machines by name.
func (c *Catalog) ListMachines(ctx context.Context) ([]Machine, error) {
	return database.All(ctx, c.db, scanMachine, selectMachine+`ORDER BY m.name`, c.now().UnixNano())
}

// GetMachine gives the machine of an id; NOT_FOUND if there is none.
func (c *Catalog) GetMachine(ctx context.Context, id string) (Machine, error) {
	return getMachine(ctx, c.db, c.now().UnixNano(), id)
}

func getMachine(ctx context.Context, q database.Querier, now int64, id string) (Machine, error) {
	return database.One(ctx, q, noMachine(id), scanMachine, selectMachine+`WHERE m.id = ?2`, now, id)
}

func machineOf(t *database.Tx, id string) (Machine, error) {
	return getMachine(t.Ctx, t, t.Now.UnixNano(), id)
}

func noMachine(ref string) error { return notFound("machine", ref, "holdpoint ls") }

// SetMachineState records a change of a machine's lifecycle state.
func (c *Catalog) SetMachineState(ctx context.Context, id string, s machine.State) error {
	return c.db.Write(ctx, "set-machine-state", func(t *database.Tx) error {
		return t.DoOne(noMachine(id), `UPDATE machines SET state = ? WHERE id = ?`, s, id)
	})
}

// BeginRun records that a run of the machine is about to begin: what is below
// the top of its chain is sealed from now on, and the top is live. A sealed
// top is WRONG_STATE: add an overlay first.
func (c *Catalog) BeginRun(ctx context.Context, id, runID string) error {
	return c.db.Write(ctx, "begin-run", func(t *database.Tx) error {
		m, err := machineOf(t, id)
		if err != nil {
			return err
		}
		if err := wakeTop(t, m); err != nil {
			return err
		}
		return t.Do(`UPDATE machines SET run_id = ?, exit = '' WHERE id = ?`, runID, id)
	})
}

// EndRun records why a run ended and the state the machine is in now. News of
// a run that is not the machine's last is WRONG_STATE and changes nothing.
func (c *Catalog) EndRun(ctx context.Context, id, runID string, s machine.State, exit string) error {
	return c.db.Write(ctx, "end-run", func(t *database.Tx) error {
		m, err := machineOf(t, id)
		if err != nil {
			return err
		}
		if m.RunID != runID {
			return errdefs.New(errdefs.WrongState, "end run %s of machine %q: its run is %s by now", runID, m.Name, m.RunID)
		}
		return t.Do(`UPDATE machines SET state = ?, exit = ? WHERE id = ?`, s, exit, id)
	})
}

// RemoveMachine forgets a machine with its checkpoints, routes and chain; its
// layers stay recorded until they are collected. A checkpoint of it that
// another operation than opID leases is REFERENCED.
func (c *Catalog) RemoveMachine(ctx context.Context, id, opID string) error {
	return c.db.Write(ctx, "remove-machine", func(t *database.Tx) error {
		m, err := machineOf(t, id)
		if err != nil {
			return err
		}
		checkpoints, err := database.All(ctx, t, database.Value[string], `SELECT id FROM checkpoints WHERE machine_id = ? ORDER BY seq`, id)
		if err != nil {
			return err
		}
		for _, ck := range checkpoints {
			if err := journal.RefuseLeased(t, CheckpointResource, ck, opID, fmt.Sprintf("remove machine %q", m.Name)); err != nil {
				return err
			}
		}
		for _, stmt := range []string{
			`UPDATE machines SET head_checkpoint = NULL WHERE id = ?1`,
			`DELETE FROM last_used WHERE resource_id = ?1 OR scope = ?1 OR resource_id IN (SELECT id FROM checkpoints WHERE machine_id = ?1)`,
			`DELETE FROM checkpoint_layers WHERE checkpoint_id IN (SELECT id FROM checkpoints WHERE machine_id = ?1)`,
			`DELETE FROM checkpoint_routes WHERE checkpoint_id IN (SELECT id FROM checkpoints WHERE machine_id = ?1)`,
			`DELETE FROM checkpoints WHERE machine_id = ?1`,
			`DELETE FROM displaced_layers WHERE operation_id IN (SELECT operation_id FROM displaced WHERE machine_id = ?1)`,
			`DELETE FROM displaced_routes WHERE operation_id IN (SELECT operation_id FROM displaced WHERE machine_id = ?1)`,
			`DELETE FROM displaced WHERE machine_id = ?1`,
			`DELETE FROM chains WHERE machine_id = ?1`,
			`DELETE FROM routes WHERE machine_id = ?1`,
			`DELETE FROM effects WHERE machine_id = ?1`,
			`DELETE FROM machines WHERE id = ?1`,
		} {
			if err := t.Do(stmt, id); err != nil {
				return err
			}
		}
		return nil
	})
}

// UseMachine makes "last" mean the machine. It writes only when it did not.
func (c *Catalog) UseMachine(ctx context.Context, id string) error {
	return c.use(ctx, "machine", "", id)
}

// UseCheckpoint makes "last" mean the checkpoint, in the home and in its machine.
func (c *Catalog) UseCheckpoint(ctx context.Context, machineID, id string) error {
	if err := c.use(ctx, "checkpoint", machineID, id); err != nil {
		return err
	}
	return c.use(ctx, "checkpoint", "", id)
}

func (c *Catalog) use(ctx context.Context, kind, scope, id string) error {
	now, err := lastUsed(ctx, c.db, kind, scope)
	if err != nil || now == id {
		return err
	}
	return c.db.Write(ctx, "use-"+kind, func(t *database.Tx) error { return setLast(t, kind, scope, id) })
}

func setLast(t *database.Tx, kind, scope, id string) error {
	return t.Do(`INSERT INTO last_used VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET resource_id = excluded.resource_id`, kind, scope, id)
}

// lastUsed is empty when nothing was used yet.
func lastUsed(ctx context.Context, q database.Querier, kind, scope string) (string, error) {
	list, err := database.All(ctx, q, database.Value[string], `SELECT resource_id FROM last_used WHERE kind = ? AND scope = ?`, kind, scope)
	if err != nil || len(list) == 0 {
		return "", err
	}
	return list[0], nil
}
