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
// checkpoint, machine's memory, displaced machine, standby or lease has it any
// more, UnreferencedLayers lists it, its file is removed, and DeleteLayers
// forgets it.
package catalog

import (
	"context"
	"embed"
	"io/fs"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog/database"
	"github.com/holdpoint/holdpoint/internal/catalog/effects"
	"github.com/holdpoint/holdpoint/internal/catalog/journal"
	"github.com/holdpoint/holdpoint/internal/catalog/ready"
	"github.com/holdpoint/holdpoint/internal/catalog/wishes"
	"github.com/holdpoint/holdpoint/internal/durable"
)

//go:embed migrations/*.sql
var migrations embed.FS

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
// Those of operations and leases are the journal's; those of pools, standbys and booted
// checkpoints the register's; those of effects the log's; of names and machines at rest the book's.
type Catalog struct {
	*journal.Journal
	*ready.Register
	*effects.Log
	*wishes.Book
	db  *database.DB
	now func() time.Time
}

// Open opens the catalog, making it if there is none, and brings its schema up
// to date. A file that is damaged is an error of kind STORAGE and one of a
// newer schema INCOMPATIBLE; neither is changed.
func Open(ctx context.Context, cfg Config) (*Catalog, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	db, err := database.Open(ctx, database.Config{Path: cfg.Path, FS: cfg.FS, Now: cfg.Now, Migrations: files})
	if err != nil {
		return nil, err
	}
	j := journal.New(journal.Config{DB: db, Keep: cfg.KeepOperations, Ended: dropDisplaced})
	return &Catalog{Journal: j, Register: ready.New(db), Log: effects.New(db), Book: wishes.New(db), db: db, now: cfg.Now}, nil
}

// Close closes the catalog.
func (c *Catalog) Close() error { return c.db.Close() }
