package store

import (
	"context"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// MaterializeConfig says what to make of which layers.
type MaterializeConfig struct {
	FS *durable.FS
	// Path is the memory file. One that is there is replaced, whole.
	Path        string
	MemoryBytes int64
	// Layers are the whole chain, lowest first; the lowest has no parent.
	Layers []*Layer
	// Unsynced leaves out waiting for the disk. The file must then not be used
	// after the host has booted anew.
	Unsynced bool
}

// Materialize makes the memory file that a chain of layers stands for, sparse
// where the memory is zero. Each frame is checked before its pages are used;
// pages that a higher layer has are not read. On error there is no new file.
func Materialize(ctx context.Context, cfg MaterializeConfig) error {
	if err := checkChain(cfg.MemoryBytes, cfg.Layers); err != nil {
		return err
	}
	if len(cfg.Layers) == 0 || cfg.Layers[0].info.Parent != "" {
		return errdefs.New(errdefs.Invalid, "materialize %q: the lowest layer of the chain is missing", cfg.Path)
	}
	// The name is one that durable.FS.RemoveTemps knows.
	temp := cfg.Path + "." + durable.NewID() + ".tmp"
	var steps undo.Stack
	defer steps.Run()
	file, err := cfg.FS.CreateExclusive(temp, 0o600)
	if err != nil {
		return err
	}
	steps.Add(func() { _ = cfg.FS.RemoveUnsynced(temp) })
	defer file.Close()
	if err := file.OS().Truncate(cfg.MemoryBytes); err != nil {
		return errdefs.New(errdefs.Storage, "materialize %q: %w", cfg.Path, err)
	}
	m := &materialization{file: file.OS(), covered: make([]uint64, (cfg.MemoryBytes/PageSize+63)/64)}
	for i := len(cfg.Layers) - 1; i >= 0; i-- {
		if err := m.add(ctx, cfg.Layers[i], i > 0); err != nil {
			return fmt.Errorf("materialize %q: %w", filepath.Base(cfg.Path), err)
		}
	}
	if !cfg.Unsynced {
		if err := file.Sync(); err != nil {
			return err
		}
	}
	if err := file.Close(); err != nil {
		return err
	}
	rename := cfg.FS.Rename
	if cfg.Unsynced {
		rename = cfg.FS.RenameUnsynced
	}
	if err := rename(temp, cfg.Path); err != nil {
		return err
	}
	steps.Release()
	return nil
}

// materialization is a memory file in the making, from the highest layer down.
type materialization struct {
	file *os.File
	// covered has a bit for each page that a layer so far had.
	covered []uint64
}

// add writes the layer's pages that no layer above has. With mark they are
// covered afterwards.
func (m *materialization) add(ctx context.Context, l *Layer, mark bool) error {
	err := l.each(ctx,
		func(f *frame) bool {
			return len(f.sums) == 0 || m.next(f.first(), f.end(), false) == f.end()
		},
		func(i int, data []byte) error { return m.frame(l.frames[i].runs, data) })
	if err != nil || !mark {
		return err
	}
	for _, f := range l.frames {
		for _, r := range f.runs {
			for p := r.first; p < r.end(); p++ {
				m.covered[p/64] |= 1 << (p % 64)
			}
		}
	}
	return nil
}

// frame writes the pages of a frame that are not covered. Zero pages are
// holes already.
func (m *materialization) frame(runs []run, data []byte) error {
	for _, r := range runs {
		if !r.data {
			continue
		}
		end := r.end()
		for p := m.next(r.first, end, false); p < end; {
			q := m.next(p, end, true)
			if _, err := m.file.WriteAt(data[(p-r.first)*PageSize:(q-r.first)*PageSize], p*PageSize); err != nil {
				return writeError(err)
			}
			p = m.next(q, end, false)
		}
		data = data[r.count*PageSize:]
	}
	return nil
}

// next finds the first page from page on, and before end, that is covered or
// not; end if there is none.
func (m *materialization) next(page, end int64, covered bool) int64 {
	for page < end {
		w := m.covered[page/64]
		if !covered {
			w = ^w
		}
		if w >>= page % 64; w != 0 {
			return min(page+int64(bits.TrailingZeros64(w)), end)
		}
		page = (page/64 + 1) * 64
	}
	return end
}
