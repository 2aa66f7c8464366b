package catalog

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sort"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// applicationID marks the file as ours in its header: "hold" in ASCII.
const applicationID = 0x686f6c64

//go:embed migrations/*.sql
var migrationFiles embed.FS

// migrations are the schema's steps; the n-th leads to version n. A step that
// was released never changes.
func migrations() ([]string, error) {
	names, err := fs.Glob(migrationFiles, "migrations/*.sql")
	if err != nil {
		return nil, err
	}
	sort.Strings(names)
	var list []string
	for i, name := range names {
		if want := fmt.Sprintf("%03d_", i+1); filepath.Base(name)[:4] != want {
			return nil, fmt.Errorf("read migration %q: its name does not start with %s", name, want)
		}
		b, err := migrationFiles.ReadFile(name)
		if err != nil {
			return nil, err
		}
		list = append(list, string(b))
	}
	return list, nil
}

func openDB(path, options string, conns int) (*sql.DB, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open catalog %q: %w", path, err)
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

// prepare makes a catalog where there is none and checks one that is there,
// without changing it. It returns the schema's version.
func prepare(ctx context.Context, cfg Config) (int, error) {
	st, err := os.Lstat(cfg.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Lstat(cfg.Path + "-wal"); err == nil {
			return 0, damaged(cfg.Path, "the file is gone but its log (-wal) is there")
		}
		return 0, create(ctx, cfg)
	case err != nil:
		return 0, errdefs.New(errdefs.Storage, "open catalog %q: %w", cfg.Path, err)
	case !st.Mode().IsRegular():
		return 0, damaged(cfg.Path, "it is not a regular file")
	case st.Size() == 0:
		return 0, damaged(cfg.Path, "it is empty")
	}
	return check(ctx, cfg.Path)
}

// create makes an empty catalog under another name and renames it, so that a
// file at cfg.Path is complete from its first moment.
func create(ctx context.Context, cfg Config) error {
	tmp := cfg.Path + "." + durable.NewID() + ".tmp"
	f, err := cfg.FS.CreateExclusive(tmp, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	db, err := openDB(tmp, "_pragma=journal_mode(MEMORY)&_pragma=synchronous(FULL)", 1)
	if err == nil {
		_, err = db.ExecContext(ctx, fmt.Sprintf("PRAGMA application_id = %d; VACUUM", applicationID))
		err = errors.Join(err, db.Close())
	}
	if err == nil {
		err = cfg.FS.Sync(tmp)
	}
	if err == nil {
		err = cfg.FS.Rename(tmp, cfg.Path)
	}
	if err != nil {
		_ = cfg.FS.Remove(tmp) // RemoveTemps sweeps what is left
		return classify(cfg.Path, err)
	}
	return nil
}

// check reads the whole file once for damage (a catalog is a few MiB at most)
// and tells its version.
func check(ctx context.Context, path string) (version int, err error) {
	db, err := openDB(path, "mode=ro&"+pragmas, 1)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	number := func(pragma string) (n int, err error) {
		return n, db.QueryRowContext(ctx, "PRAGMA "+pragma).Scan(&n)
	}
	id, err := number("application_id")
	if err != nil {
		return 0, classify(path, err)
	}
	if id != applicationID {
		return 0, damaged(path, "it is not a catalog of holdpoint")
	}
	if version, err = number("user_version"); err != nil {
		return 0, classify(path, err)
	}
	steps, err := migrations()
	if err != nil {
		return 0, err
	}
	if version > len(steps) {
		return 0, errdefs.New(errdefs.Incompatible,
			"open catalog %q: its schema is version %d, this build knows up to %d; use the newer holdpoint", path, version, len(steps))
	}
	var verdict string
	if err := db.QueryRowContext(ctx, "PRAGMA quick_check(1)").Scan(&verdict); err != nil {
		return 0, classify(path, err)
	}
	if verdict != "ok" {
		return 0, damaged(path, verdict)
	}
	return version, nil
}

func (c *Catalog) migrate(ctx context.Context, version int) error {
	var mode string
	if err := c.w.QueryRowContext(ctx, "PRAGMA journal_mode = WAL").Scan(&mode); err != nil {
		return c.storage(err)
	}
	if mode != "wal" {
		return errdefs.New(errdefs.Storage, "open catalog %q: its file system has no write-ahead log (%s); move the home to a local disk", c.cfg.Path, mode)
	}
	steps, err := migrations()
	if err != nil {
		return err
	}
	for n := version + 1; n <= len(steps); n++ {
		err := c.write(ctx, fmt.Sprintf("migrate-%d", n), func(t *tx) error {
			return t.exec(steps[n-1] + fmt.Sprintf("\nPRAGMA user_version = %d;", n))
		})
		if err != nil {
			return fmt.Errorf("migrate catalog %q to version %d: %w", c.cfg.Path, n, err)
		}
	}
	return nil
}

func damaged(path, how string) error {
	return errdefs.New(errdefs.Storage,
		"open catalog %q: damaged (%s); stop the daemon and put a backup back, or move the file and its -wal away to begin anew", path, oneLine(how))
}

// storage gives the database's own failures their kind; others pass.
func (c *Catalog) storage(err error) error { return classify(c.cfg.Path, err) }

func classify(path string, err error) error {
	var se *sqlite.Error
	if !errors.As(err, &se) {
		return err
	}
	switch se.Code() & 0xff {
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return damaged(path, se.Error())
	case sqlite3.SQLITE_FULL:
		return errdefs.New(errdefs.NoSpace, "write catalog %q: %w; free some space on its file system", path, err)
	case sqlite3.SQLITE_CONSTRAINT:
		return fmt.Errorf("write catalog %q: %w", path, err)
	}
	return errdefs.New(errdefs.Storage, "use catalog %q: %w", path, err)
}

// isUnique reports a violation of a UNIQUE or PRIMARY KEY rule.
func isUnique(err error) bool {
	var se *sqlite.Error
	return errors.As(err, &se) &&
		(se.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE || se.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
}

func oneLine(s string) string {
	b := []byte(s)
	for i := range b {
		if b[i] == '\n' || b[i] == '\r' {
			b[i] = ' '
		}
	}
	return string(b)
}
