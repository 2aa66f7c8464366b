// Package catalog is the daemon's memory: images, machines and their chains,
// layers, checkpoints, routes, operations and leases, in one SQLite file. Each
// writing method is one transaction with one meaning, durable when it returns;
// what a row means is said beside it in migrations/. It touches no file but
// its own: layers' bytes are made and removed elsewhere, before they are
// recorded and after they are forgotten. It keeps the rules that hold between
// records (names, references, who holds what) and no policy.
//
// The life of a layer: its file is created; AddOverlay makes it the top of a
// machine's chain, or AddLayer stages it under an operation's lease;
// BeginRun makes the top live; PublishCheckpoint seals it; and when no chain,
// checkpoint, displaced chain or lease has it any more, UnreferencedLayers
// lists it, its file is removed, and DeleteLayers forgets it.
package catalog

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Config is what a catalog is opened with.
type Config struct {
	// Path is the SQLite file. Its folder exists. SQLite keeps Path-wal and
	// Path-shm beside it. Only one process may have it open: the daemon's
	// lock of its home sees to that.
	Path string
	// FS is told of each commit, and makes the file; nil writes for real.
	FS *durable.FS
	// Now is the clock of leases and of times left empty; nil is time.Now.
	Now func() time.Time
	// KeepOperations is how many ended operations are kept; 0 is 1,000.
	KeepOperations int
}

// Catalog is an open catalog. Its methods may be called at the same time.
type Catalog struct {
	cfg Config
	w   *sql.DB // one connection, so writers queue in the process
	r   *sql.DB
}

// Memory: the daemon is to idle below 40 MiB, and a catalog is small.
const (
	readers = 2
	pragmas = "_pragma=busy_timeout(5000)&_pragma=foreign_keys(1)&_pragma=synchronous(FULL)" +
		"&_pragma=cache_size(-256)&_pragma=temp_store(MEMORY)&_pragma=trusted_schema(0)" +
		"&_pragma=journal_size_limit(1048576)&_pragma=wal_autocheckpoint(200)"
)

// Open opens the catalog, making it if there is none, and brings its schema up
// to date. A file that is damaged is an error of kind STORAGE and one of a
// newer schema INCOMPATIBLE; neither is changed.
func Open(ctx context.Context, cfg Config) (*Catalog, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.KeepOperations == 0 {
		cfg.KeepOperations = 1000
	}
	version, err := prepare(ctx, cfg)
	if err != nil {
		return nil, err
	}
	c := &Catalog{cfg: cfg}
	if c.w, err = openDB(cfg.Path, "_txlock=immediate&"+pragmas, 1); err != nil {
		return nil, err
	}
	if c.r, err = openDB(cfg.Path, "mode=ro&_pragma=query_only(1)&"+pragmas, readers); err != nil {
		return nil, errors.Join(err, c.w.Close())
	}
	if err := c.migrate(ctx, version); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Close closes the catalog.
func (c *Catalog) Close() error {
	// The writer last: it folds the log into the file.
	return c.storage(errors.Join(c.r.Close(), c.w.Close()))
}

// tx is one transaction that writes.
type tx struct {
	ctx context.Context
	*sql.Tx
	now time.Time
}

// write runs fn in one transaction and commits it as the step name.
func (c *Catalog) write(ctx context.Context, name string, fn func(*tx) error) error {
	t, err := c.w.BeginTx(ctx, nil)
	if err != nil {
		return c.storage(err)
	}
	defer func() { _ = t.Rollback() }() // after a commit it does nothing
	if err := fn(&tx{ctx: ctx, Tx: t, now: c.cfg.Now()}); err != nil {
		return c.storage(err)
	}
	return c.storage(c.cfg.FS.Commit(name, t.Commit))
}

func (t *tx) exec(query string, args ...any) error {
	_, err := t.ExecContext(t.ctx, query, args...)
	return err
}

// execOne is exec of a statement that must change exactly one row.
func (t *tx) execOne(missing error, query string, args ...any) error {
	res, err := t.ExecContext(t.ctx, query, args...)
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err == nil && n == 0 {
		return missing
	}
	return err
}

// querier is a reading connection or a transaction.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// all gives every row of a query, each through scan.
func all[T any](ctx context.Context, q querier, scan func(*sql.Rows) (T, error), query string, args ...any) ([]T, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }() // rows.Err has told
	var list []T
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, rows.Err()
}

// one gives the only row of a query, or missing if there is none.
func one[T any](ctx context.Context, q querier, missing error, scan func(*sql.Rows) (T, error), query string, args ...any) (T, error) {
	list, err := all(ctx, q, scan, query, args...)
	if err == nil && len(list) == 0 {
		err = missing
	}
	if err != nil {
		var zero T
		return zero, err
	}
	return list[0], nil
}

func scanValue[T any](rows *sql.Rows) (T, error) {
	var v T
	err := rows.Scan(&v)
	return v, err
}

// view runs fn in one read transaction, so that all it reads is of one moment.
func (c *Catalog) view(ctx context.Context, fn func(querier) error) error {
	t, err := c.r.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return c.storage(err)
	}
	defer func() { _ = t.Rollback() }() // nothing was written
	return c.storage(fn(t))
}

func notFound(noun, ref, list string) error {
	return errdefs.New(errdefs.NotFound, "find %s %q: there is none; see %s", noun, ref, list)
}

func toNano(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromNano(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}

// orNow is t, or the transaction's time if t is zero, in nanoseconds.
func (t *tx) orNow(at time.Time) int64 {
	if at.IsZero() {
		at = t.now
	}
	return at.UnixNano()
}

func orEmpty(json []byte) string {
	if len(json) == 0 {
		return "{}"
	}
	return string(json)
}
