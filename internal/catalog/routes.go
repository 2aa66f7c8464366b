package catalog

import (
	"context"
	"database/sql"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/rows"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const selectRoute = `SELECT r.host, r.machine_id, r.port, r.created_at, m.name FROM routes r JOIN machines m ON m.id = r.machine_id `

func scanRoute(rows *sql.Rows) (Route, error) {
	var (
		r       Route
		created int64
	)
	err := rows.Scan(&r.Host, &r.MachineID, &r.Port, &created, &r.Machine)
	r.CreatedAt = database.Time(created)
	return r, err
}

// PutRoute publishes a host name, or moves it to another port of the same
// machine. One that leads to another machine is a CONFLICT that names it.
func (c *Catalog) PutRoute(ctx context.Context, r Route) error {
	return c.db.Write(ctx, "put-route", func(t *database.Tx) error {
		if _, err := machineOf(t, r.MachineID); err != nil {
			return err
		}
		old, err := database.All(ctx, t, scanRoute, selectRoute+`WHERE r.host = ?`, r.Host)
		if err != nil {
			return err
		}
		if len(old) > 0 && old[0].MachineID != r.MachineID {
			return errdefs.New(errdefs.Conflict, "publish %q: it leads to machine %q; choose another, or withdraw it with: holdpoint unexpose %s",
				r.Host, old[0].Machine, r.Host)
		}
		return t.Do(`INSERT INTO routes VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET port = excluded.port`,
			r.Host, r.MachineID, r.Port, t.OrNow(r.CreatedAt))
	})
}

// RemoveRoute withdraws a host name; NOT_FOUND if it is not published.
func (c *Catalog) RemoveRoute(ctx context.Context, host string) error {
	return c.db.Write(ctx, "remove-route", func(t *database.Tx) error {
		return t.DoOne(noRoute(host), `DELETE FROM routes WHERE host = ?`, host)
	})
}

// GetRoute gives the route of a host name; NOT_FOUND if it is not published.
func (c *Catalog) GetRoute(ctx context.Context, host string) (Route, error) {
	return database.One(ctx, c.db, noRoute(host), scanRoute, selectRoute+`WHERE r.host = ?`, host)
}

// ListRoutes gives the routes of a machine, or of all when the id is empty, by host.
func (c *Catalog) ListRoutes(ctx context.Context, machineID string) ([]Route, error) {
	return database.All(ctx, c.db, scanRoute, selectRoute+`WHERE ?1 = '' OR r.machine_id = ?1 ORDER BY r.host`, machineID)
}

func noRoute(host string) error { return rows.NotFound("route", host, "holdpoint routes") }

// restoreRoutes makes the machine's routes those of a checkpoint. Hosts that
// are another machine's stay there.
func restoreRoutes(t *database.Tx, machineID string, routes []checkpoint.Route) error {
	if err := t.Do(`DELETE FROM routes WHERE machine_id = ?`, machineID); err != nil {
		return err
	}
	for _, r := range routes {
		if err := t.Do(`INSERT OR IGNORE INTO routes VALUES (?, ?, ?, ?)`, r.Host, machineID, r.Port, t.Now.UnixNano()); err != nil {
			return err
		}
	}
	return nil
}
