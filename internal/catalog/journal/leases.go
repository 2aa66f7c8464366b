package journal

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

type holderRow struct{ id, verb string }

func scanHolder(rows *sql.Rows) (holderRow, error) {
	var h holderRow
	err := rows.Scan(&h.id, &h.verb)
	return h, err
}

// Acquire leases all claims to a running operation until ttl from now, or
// none. A claim of its own is renewed and may become exclusive. What another
// operation holds is MACHINE_BUSY for a machine, else REFERENCED, and the
// error names that operation and its verb. A lease that expired may be taken.
func (j *Journal) Acquire(ctx context.Context, opID string, ttl time.Duration, claims ...Claim) error {
	return j.cfg.DB.Write(ctx, "acquire-leases", func(t *database.Tx) error {
		_, err := database.One(ctx, t, notRunning(opID), database.Value[string], `SELECT id FROM operations WHERE id = ? AND state = 'running'`, opID)
		if err != nil {
			return err
		}
		return acquire(t, opID, t.Now.Add(ttl), claims)
	})
}

func acquire(t *database.Tx, opID string, until time.Time, claims []Claim) error {
	for _, cl := range claims {
		holders, err := database.All(t.Ctx, t, scanHolder, `SELECT o.id, o.verb FROM leases l JOIN operations o ON o.id = l.operation_id
			WHERE l.kind = ? AND l.resource_id = ? AND l.operation_id <> ? AND l.expires_at > ? AND (l.exclusive OR ?)
			ORDER BY o.seq`, cl.Kind, cl.ID, opID, t.Now.UnixNano(), cl.Exclusive)
		if err != nil {
			return err
		}
		if len(holders) > 0 {
			return busy(t, cl, holders[0])
		}
		err = t.Do(`INSERT INTO leases VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE
			SET exclusive = exclusive OR excluded.exclusive, expires_at = max(expires_at, excluded.expires_at)`,
			cl.Kind, cl.ID, opID, cl.Exclusive, until.UnixNano())
		if err != nil {
			return err
		}
	}
	return nil
}

func busy(t *database.Tx, cl Claim, h holderRow) error {
	kind, name := errdefs.Referenced, cl.ID
	if cl.Kind == Machine {
		kind = errdefs.MachineBusy
		names, err := database.All(t.Ctx, t, database.Value[string], `SELECT name FROM machines WHERE id = ?`, cl.ID)
		if err != nil {
			return err
		}
		if len(names) > 0 {
			name = names[0]
		}
	}
	return errdefs.New(kind, "%s %s is busy: %s (operation %s) runs; wait for it with: holdpoint operation wait %s", cl.Kind, name, h.verb, h.id, h.id)
}

// RefuseLeased refuses, as REFERENCED, to do what to a resource that another
// operation than opID leases, expired or not: that operation has not ended.
func RefuseLeased(t *database.Tx, kind ResourceKind, id, opID, what string) error {
	holders, err := database.All(t.Ctx, t, scanHolder, `SELECT o.id, o.verb FROM leases l JOIN operations o ON o.id = l.operation_id
		WHERE l.kind = ? AND l.resource_id = ? AND l.operation_id <> ? ORDER BY o.seq`, kind, id, opID)
	if err != nil || len(holders) == 0 {
		return err
	}
	h := holders[0]
	return errdefs.New(errdefs.Referenced, "%s: operation %s (%s) uses %s; wait with: holdpoint operation wait %s",
		what, h.id, h.verb, fmt.Sprintf("%s %s", kind, id), h.id)
}

// Renew moves the end of all leases of an operation to ttl from now, but never
// nearer.
func (j *Journal) Renew(ctx context.Context, opID string, ttl time.Duration) error {
	return j.cfg.DB.Write(ctx, "renew-leases", func(t *database.Tx) error {
		return t.Do(`UPDATE leases SET expires_at = max(expires_at, ?) WHERE operation_id = ?`, t.Now.Add(ttl).UnixNano(), opID)
	})
}

// Release gives back some leases of an operation, or all of them when no claim
// is named. Finish does it too.
func (j *Journal) Release(ctx context.Context, opID string, claims ...Claim) error {
	return j.cfg.DB.Write(ctx, "release-leases", func(t *database.Tx) error {
		if len(claims) == 0 {
			return t.Do(`DELETE FROM leases WHERE operation_id = ?`, opID)
		}
		for _, cl := range claims {
			if err := t.Do(`DELETE FROM leases WHERE operation_id = ? AND kind = ? AND resource_id = ?`, opID, cl.Kind, cl.ID); err != nil {
				return err
			}
		}
		return nil
	})
}

// Leases gives all leases, those of expired claims included, by kind and resource.
func (j *Journal) Leases(ctx context.Context) ([]Lease, error) {
	return database.All(ctx, j.cfg.DB, func(rows *sql.Rows) (l Lease, err error) {
		var until int64
		err = rows.Scan(&l.Kind, &l.ID, &l.OperationID, &l.Exclusive, &until)
		l.ExpiresAt = database.Time(until)
		return l, err
	}, `SELECT kind, resource_id, operation_id, exclusive, expires_at FROM leases ORDER BY kind, resource_id, operation_id`)
}
