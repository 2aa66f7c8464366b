package diskchain

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Uses says what wants merged files. It is asked only where there are any.
type Uses interface {
	// OpenDisks are the paths that runs have open, or are to; known is false when
	// that cannot be told.
	OpenDisks() (paths map[string]bool, known bool)
	// Chains are the disks that machines have now.
	Chains(ctx context.Context) ([][]catalog.Layer, error)
}

// Sweep removes merged files that no run has open, or may be about to, and that
// stand for nothing in the chains of machines. What another chain wants is made
// again when it is opened. Nothing is removed while layers are merged.
func (c *Chains) Sweep(ctx context.Context, uses Uses) error {
	if !c.merging.TryLock() {
		return nil
	}
	defer c.merging.Unlock()
	unused, err := c.notGivenOut()
	if err != nil || len(unused) == 0 {
		return err
	}
	open, known := uses.OpenDisks()
	maps.DeleteFunc(unused, func(path string, _ bool) bool { return !known || open[path] })
	if len(unused) == 0 {
		return nil
	}
	now, err := uses.Chains(ctx)
	if err != nil {
		return err
	}
	for _, layers := range now {
		for _, f := range c.cover(c.files(layers)) {
			delete(unused, f.Path)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var failed error
	for path := range unused {
		if _, opened := c.opened[path]; !opened {
			failed = errors.Join(failed, c.drop(path))
		}
	}
	return failed
}

// RemoveUnfinished removes what merges that were cut off have left. None may be
// under way: the daemon calls it when it starts.
func (c *Chains) RemoveUnfinished() error {
	dir := c.cfg.Home.MergedDisks()
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errdefs.New(errdefs.Storage, "list merged disks: %w", err)
	}
	var failed error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			failed = errors.Join(failed, c.cfg.Files.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(failed, c.cfg.Files.RemoveTemps(dir)) // those of stamps
}

// notGivenOut are the merged files that no run is about to open.
func (c *Chains) notGivenOut() (map[string]bool, error) {
	entries, err := os.ReadDir(c.cfg.Home.MergedDisks())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.Storage, "list merged disks: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.opened, func(_ string, at time.Time) bool { return time.Since(at) > beginning })
	paths := map[string]bool{}
	for _, e := range entries {
		id, _, _ := strings.Cut(e.Name(), ".")
		if id == "" {
			continue // a file in the making that was left: RemoveUnfinished is for it
		}
		path := filepath.Join(c.cfg.Home.MergedDisks(), id+mergedSuffix)
		if _, opened := c.opened[path]; !opened && path != c.replacing {
			paths[path] = true
		}
	}
	return paths, nil
}
