package catalog

import (
	"context"
	"database/sql"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
)

// keptEffects is how many effects of a machine are kept, the newest.
const keptEffects = 1000

// EffectKind says what happened outside a machine's disk.
type EffectKind string

// The kinds of effects.
const (
	Published EffectKind = "published"
	Withdrawn EffectKind = "withdrawn"
	CopiedOut EffectKind = "copied-out"
)

// Effect is something outside a machine's disk that no restore undoes.
type Effect struct {
	MachineID string
	Kind      EffectKind
	// What is a host name and port, or a path in the guest.
	What string
	At   time.Time
}

func scanEffect(rows *sql.Rows) (Effect, error) {
	var (
		e  Effect
		at int64
	)
	err := rows.Scan(&e.MachineID, &e.Kind, &e.What, &at)
	e.At = database.Time(at)
	return e, err
}

// RecordEffect records an effect, now if it has no time.
func (c *Catalog) RecordEffect(ctx context.Context, e Effect) error {
	return c.db.Write(ctx, "record-effect", func(t *database.Tx) error {
		err := t.Do(`INSERT INTO effects (machine_id, kind, what, at) VALUES (?, ?, ?, ?)`, e.MachineID, e.Kind, e.What, t.OrNow(e.At))
		if err != nil {
			return err
		}
		return t.Do(`DELETE FROM effects WHERE machine_id = ?1 AND seq <=
			(SELECT seq FROM effects WHERE machine_id = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)`, e.MachineID, keptEffects)
	})
}

// EffectsSince gives a machine's kept effects from a time on, oldest first.
func (c *Catalog) EffectsSince(ctx context.Context, machineID string, since time.Time) ([]Effect, error) {
	return database.All(ctx, c.db, scanEffect, `SELECT machine_id, kind, what, at FROM effects
		WHERE machine_id = ? AND at >= ? ORDER BY seq`, machineID, since.UnixNano())
}
