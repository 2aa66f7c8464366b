package memory

import (
	"context"
	"os"
	"slices"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/store"
)

const (
	// mostBases is how many files are looked into for a base, and as many for a
	// spare one.
	mostBases = 4
	// leastLikeness is which part of a memory a base must have at least: what is
	// compared and not found costs time.
	leastLikeness = 0.5
	// leastSpareLikeness is that of a file that is given up: for less its own
	// memory would be lost for too little.
	leastSpareLikeness = 0.85
	// keptUnused is how many files that nobody uses are never given up: those
	// used last, between which somebody may be going back and forth.
	keptUnused = 4
)

// base opens the file that has most of the memory, if that is enough for a base
// to make another one from; nil if there is none. ids are the layers of the memory.
func (c *Cache) base(ids []string, size int64, sample *store.Sample) *os.File {
	files, err := c.list()
	if err != nil {
		return nil
	}
	// Those of the chain, from its top down, then those used last.
	slices.Reverse(files)
	slices.SortStableFunc(files, func(a, b cached) int { return slices.Index(ids, b.id) - slices.Index(ids, a.id) })
	var best *os.File
	likeness := leastLikeness
	for _, f := range files[:min(len(files), mostBases)] {
		file, l := like(f.path, size, sample)
		if l > likeness {
			best, file, likeness = file, best, l
		}
		if file != nil {
			_ = file.Close() // nothing was written
		}
	}
	return best
}

// like opens a file and tells which part of the sample it has. One that cannot
// be read, or is of another size, has nothing of it, and may be nil.
func like(path string, size int64, sample *store.Sample) (*os.File, float64) {
	file, err := os.Open(path)
	if err != nil {
		return nil, 0
	}
	if st, err := file.Stat(); err != nil || !st.Mode().IsRegular() || st.Size() != size {
		return file, 0
	}
	return file, sample.In(file)
}

// spare takes a file from the cache that is much like the memory, to be
// rewritten, and gives the temporary name that it has now; empty if there is none.
// So many checkpoints of a machine that are restored one after the other do not
// leave a file each, of which nearly all is the same, and the next one costs
// only what differs.
func (c *Cache) spare(ctx context.Context, size int64, sample *store.Sample) string {
	inUse, begun, err := c.inUse(ctx)
	if err != nil {
		return ""
	}
	files, err := c.list()
	if err != nil {
		return ""
	}
	files = slices.DeleteFunc(files, func(f cached) bool { return slices.Contains(inUse, f.id) })
	slices.Reverse(files)
	files = files[min(len(files), keptUnused):]
	for _, f := range files[:min(len(files), mostBases)] {
		file, l := like(f.path, size, sample)
		if file != nil {
			_ = file.Close() // nothing was written
		}
		if l < leastSpareLikeness {
			continue
		}
		name := f.path + "." + durable.NewID() + ".tmp"
		taken, err := c.take(f, begun, func(path string) error { return c.cfg.Files.RenameUnsynced(path, name) })
		if err == nil && taken {
			c.cfg.Log.Info("a memory file is rewritten for another checkpoint", "layer", f.id)
			return name
		}
	}
	return ""
}
