package catalog

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/catalog/ready"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

const selectMachine = `SELECT m.id, m.name, m.image_build_id, m.spec, m.state, m.generation, m.run_id,
	m.exit, m.link_magic, coalesce(m.head_checkpoint, ''), m.memory_head, m.memory_file, m.forked_from, m.remove_on_stop, m.created_at,
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
		&m.Exit, &m.LinkMagic, &m.Head, &m.MemoryHead, &m.MemoryFile, &m.ForkedFrom, &m.RemoveOnStop, &created, &m.HeldBy, &m.ChainLength)
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
	return c.db.Write(ctx, "create-machine", func(t *database.Tx) error {
		if err := insertMachine(t, m); err != nil {
			return err
		}
		return installChain(t, m.ID, nil, first)
	})
}

// insertMachine records a machine without a disk, memory or head.
func insertMachine(t *database.Tx, m Machine) error {
	spec, err := json.Marshal(m.Spec)
	if err != nil {
		return fmt.Errorf("record machine %q: %w", m.Name, err)
	}
	if err := requireImage(t, m.ImageBuildID); err != nil {
		return err
	}
	err = t.Do(`INSERT INTO machines VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, '', '', ?, ?, ?)`,
		m.ID, m.Name, m.ImageBuildID, string(spec), m.State, int64(m.Generation), m.RunID,
		m.Exit, m.LinkMagic, m.ForkedFrom, m.RemoveOnStop, t.OrNow(m.CreatedAt))
	if database.IsUnique(err) {
		return errdefs.New(errdefs.AlreadyExists,
			"create machine %q: the name is taken; choose another, or remove that machine with: holdpoint rm --force %s", m.Name, m.Name)
	}
	if err != nil {
		return err
	}
	return rows.SetLast(t, "machine", "", m.ID)
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

func noMachine(ref string) error { return rows.NotFound("machine", ref, "holdpoint ls") }

// SetMachineState records a change of a machine's lifecycle state.
func (c *Catalog) SetMachineState(ctx context.Context, id string, s machine.State) error {
	return c.db.Write(ctx, "set-machine-state", func(t *database.Tx) error {
		return t.DoOne(noMachine(id), `UPDATE machines SET state = ? WHERE id = ?`, s, id)
	})
}

// BeginRun records that a run of the machine is about to boot: what is below
// the top of its chain is sealed from now on, the top is live, and it has no
// memory to count pages since. A sealed top is WRONG_STATE: add an overlay first.
func (c *Catalog) BeginRun(ctx context.Context, id, runID string) error {
	return c.db.Write(ctx, "begin-run", func(t *database.Tx) error {
		m, err := machineOf(t, id)
		if err != nil {
			return err
		}
		if err := wakeTop(t, m); err != nil {
			return err
		}
		if err := rows.SetMachineMemory(t, id, nil, "", ""); err != nil {
			return err
		}
		return t.Do(`UPDATE machines SET run_id = ?, exit = '' WHERE id = ?`, runID, id)
	})
}

// EndRun records why a run ended and the state the machine is in now: stopped,
// which gives up its memory, or suspended, which has that of its head and is
// WRONG_STATE unless that is a full checkpoint. The caller knows that nothing
// ran since its head. News of a run that is not the machine's last is WRONG_STATE
// and changes nothing, and so is that a suspended machine's run has stopped.
func (c *Catalog) EndRun(ctx context.Context, id, runID string, s machine.State, exit string) error {
	return c.db.Write(ctx, "end-run", func(t *database.Tx) error {
		m, err := machineOf(t, id)
		if err != nil {
			return err
		}
		if m.RunID != runID {
			return errdefs.New(errdefs.WrongState, "end run %s of machine %q: its run is %s by now", runID, m.Name, m.RunID)
		}
		switch s {
		case machine.Stopped:
			if m.State == machine.Suspended && m.Exit != "" {
				return errdefs.New(errdefs.WrongState, "end run %s of machine %q: the machine is suspended by now", runID, m.Name)
			}
			err = rows.SetMachineMemory(t, id, nil, "", "")
		case machine.Suspended:
			err = rows.ContinueHead(t, id, m.Name, m.Head)
		}
		if err != nil {
			return err
		}
		return t.Do(`UPDATE machines SET state = ?, exit = ? WHERE id = ?`, s, exit, id)
	})
}

// RemoveMachine forgets a machine with its checkpoints, their pools, its routes and its chain; its
// layers stay recorded until they are collected, and those that forks or images need stay. A checkpoint
// of it that another operation than opID leases, or that has standbys which were not ended, is REFERENCED.
func (c *Catalog) RemoveMachine(ctx context.Context, id, opID string) error {
	return c.db.Write(ctx, "remove-machine", func(t *database.Tx) error {
		m, err := machineOf(t, id)
		if err != nil {
			return err
		}
		what := fmt.Sprintf("remove machine %q", m.Name)
		checkpoints, err := database.All(ctx, t, database.Value[string], `SELECT id FROM checkpoints WHERE machine_id = ? ORDER BY seq`, id)
		if err != nil {
			return err
		}
		for _, ck := range checkpoints {
			if err := journal.RefuseLeased(t, CheckpointResource, ck, opID, what); err != nil {
				return err
			}
		}
		if err := ready.RefuseStandbys(t, what, `WHERE machine_id = ?`, id); err != nil {
			return err
		}
		return removeMachine(t, id)
	})
}

func removeMachine(t *database.Tx, id string) error {
	const its, displaced = `(SELECT id FROM checkpoints WHERE machine_id = ?1)`, `(SELECT operation_id FROM displaced WHERE machine_id = ?1)`
	for _, stmt := range []string{
		`UPDATE machines SET head_checkpoint = NULL WHERE id = ?1 OR head_checkpoint IN ` + its, // forks of it
		`UPDATE checkpoints SET parent = NULL WHERE machine_id <> ?1 AND parent IN ` + its,
		`DELETE FROM last_used WHERE resource_id = ?1 OR scope = ?1 OR resource_id IN ` + its,
		`DELETE FROM displaced_layers WHERE operation_id IN ` + displaced,
		`DELETE FROM displaced_memory WHERE operation_id IN ` + displaced,
		`DELETE FROM displaced_routes WHERE operation_id IN ` + displaced,
		`DELETE FROM displaced WHERE machine_id = ?1`,
		`DELETE FROM chains WHERE machine_id = ?1`,
		`DELETE FROM machine_memory WHERE machine_id = ?1`,
		`DELETE FROM routes WHERE machine_id = ?1`,
		`DELETE FROM effects WHERE machine_id = ?1`,
	} {
		if err := t.Do(stmt, id); err != nil {
			return err
		}
	}
	if err := rows.DeleteCheckpoints(t, `WHERE machine_id = ?1`, id); err != nil {
		return err
	}
	return t.Do(`DELETE FROM machines WHERE id = ?1`, id)
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
	now, err := rows.LastUsed(ctx, c.db, kind, scope)
	if err != nil || now == id {
		return err
	}
	return c.db.Write(ctx, "use-"+kind, func(t *database.Tx) error { return rows.SetLast(t, kind, scope, id) })
}
