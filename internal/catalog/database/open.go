package database

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sort"
	"strings"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// applicationID marks the file as ours in its header: "hold" in ASCII.
const applicationID = 0x686f6c64

func readMigrations(files fs.FS) ([]string, error) {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return nil, err
	}
	sort.Strings(names)
	var list []string
	for i, name := range names {
		if want := fmt.Sprintf("%03d_", i+1); !strings.HasPrefix(name, want) {
			return nil, fmt.Errorf("read migration %q: its name does not start with %s", name, want)
		}
		b, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		list = append(list, string(b))
	}
	return list, nil
}

// prepare makes a catalog where there is none and checks one that is there,
// without changing it. It returns the schema's version.
func prepare(ctx context.Context, cfg Config, known int) (int, error) {
	st, err := os.Lstat(cfg.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if wal, err := os.Lstat(cfg.Path + "-wal"); err == nil && wal.Size() > 0 {
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
	return check(ctx, cfg.Path, known)
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
	db, err := connect(tmp, "_pragma=journal_mode(MEMORY)&_pragma=synchronous(FULL)", 1)
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
func check(ctx context.Context, path string, known int) (version int, err error) {
	db, err := connect(path, "mode=ro&"+pragmas, 1)
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
	if version > known {
		return 0, errdefs.New(errdefs.Incompatible,
			"open catalog %q: its schema is version %d, this build knows up to %d; use the newer holdpoint", path, version, known)
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

func (d *DB) migrate(ctx context.Context, version int, steps []string) error {
	var mode string
	if err := d.w.QueryRowContext(ctx, "PRAGMA journal_mode = WAL").Scan(&mode); err != nil {
		return d.classify(err)
	}
	if mode != "wal" {
		return errdefs.New(errdefs.Storage, "open catalog %q: its file system has no write-ahead log (%s); move the home to a local disk", d.cfg.Path, mode)
	}
	if version == len(steps) {
		return nil
	}
	// A table is made anew under another name (SQLite's own procedure, in
	// "Making Other Kinds Of Table Schema Changes" of its ALTER TABLE page),
	// which references to it must outlive: they are checked at the end of each
	// step instead. The writer is one connection, so this holds for all steps.
	if _, err := d.w.ExecContext(ctx, "PRAGMA foreign_keys = OFF"); err != nil {
		return d.classify(err)
	}
	for n := version + 1; n <= len(steps); n++ {
		if err := d.step(ctx, n, steps[n-1]); err != nil {
			return fmt.Errorf("migrate catalog %q to version %d: %w", d.cfg.Path, n, err)
		}
	}
	_, err := d.w.ExecContext(ctx, "PRAGMA foreign_keys = ON")
	return d.classify(err)
}

// step is one migration, in one transaction.
func (d *DB) step(ctx context.Context, n int, script string) error {
	return d.Write(ctx, fmt.Sprintf("migrate-%d", n), func(t *Tx) error {
		if err := t.Do(script + fmt.Sprintf("\nPRAGMA user_version = %d;", n)); err != nil {
			return err
		}
		broken, err := All(ctx, t, Value[string], `SELECT "table" FROM pragma_foreign_key_check`)
		if err == nil && len(broken) > 0 {
			err = damaged(d.cfg.Path, fmt.Sprintf("a row of table %s refers to one that is not there", broken[0]))
		}
		return err
	})
}

func damaged(path, how string) error {
	return errdefs.New(errdefs.Storage,
		"open catalog %q: damaged (%s); stop the daemon and put a backup back, or move the file and its -wal away to begin anew", path, OneLine(how))
}

func (d *DB) classify(err error) error { return classify(d.cfg.Path, err) }

// classify gives SQLite's own failures their kind; others pass.
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
	case sqlite3.SQLITE_INTERRUPT:
		return errdefs.New(errdefs.Interrupted, "use catalog %q: %w", path, err)
	case sqlite3.SQLITE_CONSTRAINT:
		return fmt.Errorf("write catalog %q: %w", path, err)
	}
	return errdefs.New(errdefs.Storage, "use catalog %q: %w", path, err)
}

// IsUnique reports a violation of a UNIQUE or PRIMARY KEY rule.
func IsUnique(err error) bool {
	var se *sqlite.Error
	return errors.As(err, &se) &&
		(se.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE || se.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
}

// OneLine puts spaces in the place of line ends.
func OneLine(s string) string {
	b := []byte(s)
	for i := range b {
		if b[i] == '\n' || b[i] == '\r' {
			b[i] = ' '
		}
	}
	return string(b)
}
