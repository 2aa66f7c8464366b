// Package effects records what happened outside machines' disks, which no
// restore undoes, so that one can list it. It undoes nothing; its table lives in
// the catalog's database.
package effects

import (
	"context"
	"database/sql"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
)

// keptEffects is how many effects of a machine are kept, the newest.
const keptEffects = 1000

// Log is the effects of a database. Its methods may be called at the same time.
type Log struct{ db *database.DB }

// New returns a log in db, which is open.
func New(db *database.DB) *Log { return &Log{db: db} }

// Kind says what happened outside a machine's disk.
type Kind string

// The kinds of effects.
const (
	Published Kind = "published"
	Withdrawn Kind = "withdrawn"
	CopiedOut Kind = "copied-out"
)

// Effect is something outside a machine's disk that no restore undoes.
type Effect struct {
	MachineID string
	Kind      Kind
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
func (l *Log) RecordEffect(ctx context.Context, e Effect) error {
	return l.db.Write(ctx, "record-effect", func(t *database.Tx) error {
		err := t.Do(`INSERT INTO effects (machine_id, kind, what, at) VALUES (?, ?, ?, ?)`, e.MachineID, e.Kind, e.What, t.OrNow(e.At))
		if err != nil {
			return err
		}
		return t.Do(`DELETE FROM effects WHERE machine_id = ?1 AND seq <=
			(SELECT seq FROM effects WHERE machine_id = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)`, e.MachineID, keptEffects)
	})
}

// EffectsSince gives a machine's kept effects from a time on, oldest first.
func (l *Log) EffectsSince(ctx context.Context, machineID string, since time.Time) ([]Effect, error) {
	return database.All(ctx, l.db, scanEffect, `SELECT machine_id, kind, what, at FROM effects
		WHERE machine_id = ? AND at >= ? ORDER BY seq`, machineID, since.UnixNano())
}
