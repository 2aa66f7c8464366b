package diskchain

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/disk"
)

// file is one file of a chain: a layer, or what several were merged into.
type file struct {
	disk.Layer
	// first and last are the ids of the layers that it stands for.
	first, last string
}

// isLayer reports whether it is a layer's own file.
func (f file) isLayer() bool { return f.first == f.last }

// mergedSuffix ends the name of a merged file, which begins with its id, and
// idDash is in that id between those of two layers.
const (
	mergedSuffix = ".qcow2"
	idDash       = "-"
)

// Worth reports whether a run has so many layers open that it is worth merging
// some: open are the ids of its disk, the image and the top included.
func Worth(open []string) bool {
	n := 0
	for i := len(open) - 2; i > 0 && !strings.Contains(open[i], idDash); i-- {
		n++
	}
	return n >= step
}

// files are the layers' own.
func (c *Chains) files(layers []catalog.Layer) []file {
	files := make([]file, len(layers))
	for i, l := range layers {
		path := filepath.Join(c.cfg.Home.Dir(), filepath.FromSlash(l.Path))
		files[i] = file{disk.Layer{ID: l.ID, Path: path, Format: l.Format}, l.ID, l.ID}
	}
	return files
}

// merged is the file that the layers from first to last are merged into, or
// would be.
func (c *Chains) merged(first, last string) file {
	id := first + idDash + last
	return file{disk.Layer{ID: id, Path: filepath.Join(c.cfg.Home.MergedDisks(), id+mergedSuffix), Format: disk.Qcow2}, first, last}
}

// cover stands for all layers with as few files as there are: from below the top
// down, the merged file that reaches furthest, or the layer itself.
func (c *Chains) cover(all []file) (files []file) {
	entries, err := os.ReadDir(c.cfg.Home.MergedDisks())
	if err != nil || len(all) == 0 {
		return all // there are none yet
	}
	firsts := map[string][]string{} // by the last layer
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), mergedSuffix)
		first, last, both := strings.Cut(id, idDash)
		if ok && both && e.Type().IsRegular() {
			firsts[last] = append(firsts[last], first)
		}
	}
	position := positions(all)
	files = append(files, all[len(all)-1])
	for end := len(all) - 2; end >= 0; end-- {
		f, lowest := all[end], end
		for _, first := range firsts[f.last] {
			at, known := position[first]
			if m := c.merged(first, f.last); known && at < lowest && m.sound() {
				lowest, f = at, m
			}
		}
		files, end = append(files, f), lowest
	}
	slices.Reverse(files)
	return files
}

// current are the files of a run, by their ids; fits is whether they stand for
// all layers, each once, with the same top.
func (c *Chains) current(all []file, open []string) (files []file, fits bool) {
	position := positions(all)
	end := 0
	for _, id := range open[min(1, len(open)):] { // the image is below
		f := file{first: id, last: id}
		if first, last, merged := strings.Cut(id, idDash); merged {
			f = c.merged(first, last)
		}
		from, known := position[f.first]
		to, too := position[f.last]
		if !known || !too || from != end || to < from {
			return nil, false
		}
		if from == to {
			f = all[from]
		}
		files, end = append(files, f), to+1
	}
	return files, end == len(all) && end > 0 && files[len(files)-1].first == all[end-1].ID
}

func positions(all []file) map[string]int {
	position := make(map[string]int, len(all))
	for i, f := range all {
		position[f.ID] = i
	}
	return position
}

// unmerged counts the layers below the top that are in no merged file, from the
// top down to the first that is.
func unmerged(files []file) (n int) {
	for i := len(files) - 2; i >= 0 && files[i].isLayer(); i-- {
		n++
	}
	return n
}

// next is the lowest of the files that are merged next.
func next(files []file) (from int) {
	var above int64
	from = len(files) - 1
	for range unmerged(files) {
		from--
		above += size(files[from])
	}
	for from > 0 && size(files[from-1]) <= growth*above {
		from--
		above += size(files[from])
	}
	return from
}

// size is how long the file is, in bytes; 0 for one that is missing.
func size(f file) int64 {
	info, err := os.Lstat(f.Path)
	if err != nil {
		return 0
	}
	return info.Size()
}

func plain(files []file) []disk.Layer {
	layers := make([]disk.Layer, len(files))
	for i, f := range files {
		layers[i] = f.Layer
	}
	return layers
}
