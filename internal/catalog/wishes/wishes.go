// Package wishes records what people want of a machine that exists: what it is
// called, and that it stays stopped. It does nothing about either; its table
// lives in the catalog's database.
package wishes

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Book is the records of a database. Its methods may be called at the same time.
type Book struct{ db *database.DB }

// New returns a book in db, which is open.
func New(db *database.DB) *Book { return &Book{db: db} }

// Rename gives the machine of an id another name; one that is taken is
// ALREADY_EXISTS.
func (b *Book) Rename(ctx context.Context, machineID, name string) error {
	return b.db.Write(ctx, "rename-machine", func(t *database.Tx) error {
		err := t.DoOne(rows.NotFound("machine", machineID, "holdpoint ls"), `UPDATE machines SET name = ? WHERE id = ?`, name, machineID)
		if database.IsUnique(err) {
			return errdefs.New(errdefs.AlreadyExists, "rename a machine to %q: the name is taken; choose another, or rename that machine first", name)
		}
		return err
	})
}

// PutToRest records that a person has stopped the machine.
func (b *Book) PutToRest(ctx context.Context, machineID string) error {
	return b.db.Write(ctx, "put-to-rest", func(t *database.Tx) error {
		return t.Do(`INSERT INTO at_rest VALUES (?) ON CONFLICT DO NOTHING`, machineID)
	})
}

// EndRest records that the machine is wanted again, if it still runs and nobody is
// about to stop it. One that is not at rest is no error.
func (b *Book) EndRest(ctx context.Context, machineID string) error {
	return b.db.Write(ctx, "end-rest", func(t *database.Tx) error {
		return t.Do(`DELETE FROM at_rest WHERE machine_id = ?1
			AND EXISTS (SELECT 1 FROM machines WHERE id = ?1 AND state = 'running')
			AND NOT EXISTS (SELECT 1 FROM leases WHERE kind = 'machine' AND resource_id = ?1 AND exclusive)`, machineID)
	})
}

// AtRest gives the machines that a person has stopped.
func (b *Book) AtRest(ctx context.Context) (map[string]bool, error) {
	list, err := database.All(ctx, b.db, database.Value[string], `SELECT machine_id FROM at_rest`)
	resting := make(map[string]bool, len(list))
	for _, id := range list {
		resting[id] = true
	}
	return resting, err
}
