// Package journal records operations and what they lease: who asked for what,
// how far it came, how it ended. It runs none of them, and knows machines by
// id only; its tables live in the catalog's database.
package journal

import (
	"github.com/holdpoint/holdpoint/internal/catalog/database"
)

// Config is what a journal is made of.
type Config struct {
	DB *database.DB
	// Keep is how many ended operations are kept; 0 is 1,000.
	Keep int
	// Ended, when not nil, drops what else was kept for an operation, in the
	// transaction that ends it.
	Ended func(t *database.Tx, opID string) error
}

// Journal is the operations and leases of a database.
type Journal struct{ cfg Config }

// New returns a journal in cfg.DB, which is open.
func New(cfg Config) *Journal {
	if cfg.Keep == 0 {
		cfg.Keep = 1000
	}
	if cfg.Ended == nil {
		cfg.Ended = func(*database.Tx, string) error { return nil }
	}
	return &Journal{cfg: cfg}
}
