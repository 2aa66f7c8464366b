// Package database is one SQLite file of ours: it is made, checked and brought
// up to date by numbered migrations, has one writer and a few readers, and
// every commit is a step of durable. It knows no table; the catalog does.
package database

import (
	"context"
	"database/sql"
	"errors"
	"io/fs"
	"net/url"
	"path/filepath"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Config is what a database is opened with.
type Config struct {
	// Path is the file. Its folder exists. SQLite keeps Path-wal and Path-shm
	// beside it.
	Path string
	// FS is told of each commit, and makes the file; nil writes for real.
	FS *durable.FS
	// Now is the clock of transactions.
	Now func() time.Time
	// Migrations holds NNN_NAME.sql files; the n-th leads to schema version n.
	// One that was released never changes.
	Migrations fs.FS
}

// DB is an open database. Its methods may be called at the same time.
type DB struct {
	cfg Config
	w   *sql.DB // one connection, so writers queue in the process
	r   *sql.DB
}

// Memory: the daemon is to idle below 40 MiB, and its database is small.
const (
	readers = 2
	pragmas = "_pragma=busy_timeout(5000)&_pragma=foreign_keys(1)&_pragma=synchronous(FULL)" +
		"&_pragma=cache_size(-256)&_pragma=temp_store(MEMORY)&_pragma=trusted_schema(0)" +
		"&_pragma=journal_size_limit(1048576)&_pragma=wal_autocheckpoint(200)"
)

// Open opens the database, making it if there is none, and brings its schema
// up to date. A file that is damaged is an error of kind STORAGE and one of a
// newer schema INCOMPATIBLE; neither is changed.
func Open(ctx context.Context, cfg Config) (*DB, error) {
	steps, err := readMigrations(cfg.Migrations)
	if err != nil {
		return nil, err
	}
	version, err := prepare(ctx, cfg, len(steps))
	if err != nil {
		return nil, err
	}
	d := &DB{cfg: cfg}
	if d.w, err = connect(cfg.Path, "_txlock=immediate&"+pragmas, 1); err != nil {
		return nil, err
	}
	if d.r, err = connect(cfg.Path, "mode=ro&_pragma=query_only(1)&"+pragmas, readers); err != nil {
		return nil, errors.Join(err, d.w.Close())
	}
	if err := d.migrate(ctx, version, steps); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func connect(path, options string, conns int) (*sql.DB, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "open catalog %q: %w", path, err)
	}
	u := url.URL{Scheme: "file", Path: filepath.ToSlash(abs), RawQuery: options}
	db, err := sql.Open("sqlite", u.String())
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "open catalog %q: %w", path, err)
	}
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	return db, nil
}

// Close closes the database.
func (d *DB) Close() error {
	// The writer last: it folds the log into the file.
	return d.classify(errors.Join(d.r.Close(), d.w.Close()))
}

// Tx is a transaction that writes.
type Tx struct {
	*sql.Tx
	// Ctx bounds the transaction.
	Ctx context.Context
	// Now is when it began.
	Now time.Time
}

// Write runs fn in one transaction and commits it as the step name. An error
// of fn leaves everything as it was.
func (d *DB) Write(ctx context.Context, name string, fn func(*Tx) error) error {
	t, err := d.w.BeginTx(ctx, nil)
	if err != nil {
		return d.classify(err)
	}
	defer func() { _ = t.Rollback() }() // after a commit it does nothing
	if err := fn(&Tx{Ctx: ctx, Tx: t, Now: d.cfg.Now()}); err != nil {
		return d.classify(err)
	}
	return d.classify(d.cfg.FS.Commit(name, t.Commit))
}

// Do runs one statement.
func (t *Tx) Do(query string, args ...any) error {
	_, err := t.ExecContext(t.Ctx, query, args...)
	return err
}

// DoOne runs a statement that must change a row; if it changes none, the error
// is missing.
func (t *Tx) DoOne(missing error, query string, args ...any) error {
	res, err := t.ExecContext(t.Ctx, query, args...)
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err == nil && n == 0 {
		return missing
	}
	return err
}

// OrNow is at, or the transaction's time if at is zero, in nanoseconds.
func (t *Tx) OrNow(at time.Time) int64 {
	if at.IsZero() {
		at = t.Now
	}
	return at.UnixNano()
}

// View runs fn in one read transaction, so that all it reads is of one moment.
func (d *DB) View(ctx context.Context, fn func(Querier) error) error {
	t, err := d.r.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return d.classify(err)
	}
	defer func() { _ = t.Rollback() }() // nothing was written
	return d.classify(fn(t))
}

// QueryContext reads on one of the readers.
func (d *DB) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return d.r.QueryContext(ctx, query, args...)
}

// Querier is a DB or a transaction of it.
type Querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Scan reads one row.
type Scan[T any] func(*sql.Rows) (T, error)

// Value is the Scan of a single column.
func Value[T any](rows *sql.Rows) (T, error) {
	var v T
	err := rows.Scan(&v)
	return v, err
}

// All gives every row of a query.
func All[T any](ctx context.Context, q Querier, scan Scan[T], query string, args ...any) ([]T, error) {
	list, err := collect(ctx, q, scan, query, args...)
	if d, ok := q.(*DB); ok { // within a transaction, its end does it
		err = d.classify(err)
	}
	return list, err
}

func collect[T any](ctx context.Context, q Querier, scan Scan[T], query string, args ...any) ([]T, error) {
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

// One gives the first row of a query, or the error missing if there is none.
func One[T any](ctx context.Context, q Querier, missing error, scan Scan[T], query string, args ...any) (v T, err error) {
	list, err := All(ctx, q, scan, query, args...)
	if err == nil && len(list) == 0 {
		err = missing
	}
	if err != nil {
		return v, err
	}
	return list[0], nil
}

// Time is the time of a column in Unix nanoseconds; 0 is the zero time.
func Time(nano int64) time.Time {
	if nano == 0 {
		return time.Time{}
	}
	return time.Unix(0, nano).UTC()
}

// JSON is the text of a JSON column; nothing becomes an empty object.
func JSON(b []byte) string {
	if len(b) == 0 {
		return "{}"
	}
	return string(b)
}
