package memory

import (
	"os"
	"slices"

	"github.com/holdpoint/holdpoint/internal/store"
)

const (
	// mostBases is how many files are looked into for a base.
	mostBases = 4
	// leastLikeness is which part of a memory a base must have at least: what is
	// compared and not found costs time.
	leastLikeness = 0.5
)

// base opens the file that has most of the memory of the layers, of which ids
// are the names, as a base to make another one from. Nil: none has enough.
func (c *Cache) base(ids []string, layers []*store.Layer) *os.File {
	size := layers[0].Info().MemoryBytes
	sample, err := store.NewSample(size, layers)
	if err != nil {
		return nil // as making the file will say
	}
	var best *os.File
	likeness := leastLikeness
	for _, path := range c.bases(ids) {
		file, err := os.Open(path)
		if err != nil {
			continue // it has gone meanwhile
		}
		if st, err := file.Stat(); err == nil && st.Mode().IsRegular() && st.Size() == size {
			if l := sample.In(file); l > likeness {
				best, file, likeness = file, best, l
			}
		}
		if file != nil {
			_ = file.Close() // nothing was written
		}
	}
	return best
}

// bases are the files that may be alike: first those of layers of the chain,
// from its top down, then those used last.
func (c *Cache) bases(ids []string) []string {
	files, err := c.list()
	if err != nil {
		return nil
	}
	slices.Reverse(files)
	slices.SortStableFunc(files, func(a, b cached) int { return slices.Index(ids, b.id) - slices.Index(ids, a.id) })
	var paths []string
	for _, f := range files[:min(len(files), mostBases)] {
		paths = append(paths, f.path)
	}
	return paths
}
