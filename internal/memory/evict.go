package memory

import (
	"context"
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// cached is a file of the cache.
type cached struct {
	id, path string
	// bytes is what it takes on the host.
	bytes int64
	used  time.Time
}

// list gives the files, least recently used first.
func (c *Cache) list() ([]cached, error) {
	entries, err := os.ReadDir(c.cfg.Home.MemoryFiles())
	if err != nil {
		return nil, errdefs.As(errdefs.Storage, err)
	}
	var list []cached
	for _, e := range entries {
		if id, err := hex.DecodeString(e.Name()); err != nil || len(id) != 8 {
			continue // not a layer's: the mark, or one in the making
		}
		f := cached{id: e.Name(), path: filepath.Join(c.cfg.Home.MemoryFiles(), e.Name())}
		st, err := e.Info()
		if err != nil {
			continue // it has gone meanwhile
		}
		f.used = st.ModTime()
		if f.bytes, err = disk.Allocated(f.path); err != nil {
			continue
		}
		list = append(list, f)
	}
	slices.SortStableFunc(list, func(a, b cached) int { return a.used.Compare(b.used) })
	return list, nil
}

// Evict removes files that nobody uses until all take MaxBytes at most: first
// those whose layer is gone, which nobody can open again, however much room
// there is; then the least recently used.
func (c *Cache) Evict(ctx context.Context) error {
	_, err := c.evict(ctx, c.cfg.MaxBytes)
	return err
}

// makeRoom evicts all that nobody uses, and reports whether that was anything.
func (c *Cache) makeRoom(ctx context.Context) bool {
	freed, err := c.evict(ctx, 0)
	if err != nil {
		c.cfg.Log.Warn("could not evict memory files", "err", err)
	}
	return freed > 0
}

// inUse gives the layers whose files runs map. Whoever has one opened or releases
// it after begun may have recorded its run too late for this answer.
func (c *Cache) inUse(ctx context.Context) (ids []string, begun int64, err error) {
	c.mu.Lock()
	begun = c.touches
	c.mu.Unlock()
	ids, err = c.cfg.Catalog.MemoryFilesInUse(ctx)
	return ids, begun, err
}

func (c *Cache) evict(ctx context.Context, limit int64) (freed int64, err error) {
	inUse, begun, err := c.inUse(ctx)
	if err != nil {
		return 0, err
	}
	files, err := c.list()
	if err != nil {
		return 0, err
	}
	var total int64
	orphans := make(map[string]bool)
	for _, f := range files {
		total += f.bytes
		_, err := c.cfg.Catalog.GetLayers(ctx, f.id)
		if err != nil && !errdefs.Is(err, errdefs.NotFound) {
			return 0, err
		}
		orphans[f.id] = err != nil
	}
	for _, orphan := range []bool{true, false} {
		for _, f := range files {
			if orphans[f.id] != orphan || !orphan && total <= limit || slices.Contains(inUse, f.id) {
				continue
			}
			gone, err := c.remove(f, begun)
			if err != nil {
				return freed, err
			}
			if gone {
				total -= f.bytes
				freed += f.bytes
			}
		}
	}
	return freed, nil
}

// remove removes a file unless somebody has it opened, or had since begun.
func (c *Cache) remove(f cached, begun int64) (bool, error) {
	gone, err := c.take(f, begun, c.cfg.Files.RemoveUnsynced)
	if gone {
		c.cfg.Log.Info("evicted memory file", "layer", f.id, "bytes", f.bytes)
	}
	return gone, err
}

// take takes a file from the cache, by away, unless somebody has it opened, or
// had since begun.
func (c *Cache) take(f cached, begun int64, away func(path string) error) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.entries[f.id]; e != nil {
		if e.leases > 0 || e.touched > begun {
			return false, nil
		}
		delete(c.entries, f.id)
	}
	if err := away(f.path); err != nil {
		return false, err
	}
	return true, nil
}
