package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"runtime"
	"slices"

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
	// Base, which may be nil, is a memory that has pages of the wanted one where
	// they belong, such as an older memory file (see Sample). They are taken from
	// it, each by its digest; what it does not have comes from the layers.
	Base io.ReaderAt
	// Spare, which may be empty, is an older memory file that nobody needs any
	// more, under a temporary name. It is rewritten where it differs, with itself
	// as the base, and becomes the new one: so only what differs is written, and a
	// few zero pages may stay without a hole. One of another size, or that somebody
	// still has open or mapped, is removed.
	Spare string
	// Unsynced leaves out waiting for the disk. The file must then not be used
	// after the host has booted anew.
	Unsynced bool
}

// Materialize makes the memory file that a chain of layers stands for, sparse
// where the memory is zero. Each frame or page is checked before it is used;
// pages that a higher layer has are not read. On error there is no new file.
func Materialize(ctx context.Context, cfg MaterializeConfig) error {
	var steps undo.Stack
	defer steps.Run()
	if cfg.Spare != "" {
		steps.Add(func() { _ = cfg.FS.RemoveUnsynced(cfg.Spare) })
	}
	m, err := newMaterialization(cfg.MemoryBytes, cfg.Layers)
	if err != nil {
		return fmt.Errorf("materialize %q: %w", filepath.Base(cfg.Path), err)
	}
	temp, file, err := m.begin(cfg)
	if err != nil {
		return err
	}
	steps.Add(func() { _ = cfg.FS.RemoveUnsynced(temp) })
	defer file.Close()
	if err := m.make(ctx, file); err != nil {
		return fmt.Errorf("materialize %q: %w", filepath.Base(cfg.Path), err)
	}
	if err := file.Close(); err != nil {
		return writeError(err)
	}
	if !cfg.Unsynced {
		if err := cfg.FS.Sync(temp); err != nil {
			return err
		}
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

// begin opens the file to write to, which is the spare one or new. Its name is
// one that durable.FS.RemoveTemps knows.
func (m *materialization) begin(cfg MaterializeConfig) (temp string, file *os.File, err error) {
	if cfg.Spare != "" {
		if file := adopt(cfg.Spare, cfg.MemoryBytes); file != nil {
			m.base, m.inPlace = file, true
			return cfg.Spare, file, nil
		}
		if err := cfg.FS.RemoveUnsynced(cfg.Spare); err != nil {
			return "", nil, err
		}
	}
	m.base = cfg.Base
	temp = cfg.Path + "." + durable.NewID() + ".tmp"
	created, err := cfg.FS.CreateExclusive(temp, 0o600)
	if err != nil {
		return "", nil, err
	}
	if err := created.OS().Truncate(cfg.MemoryBytes); err != nil {
		return "", nil, errors.Join(
			errdefs.New(errdefs.Storage, "materialize %q: %w", cfg.Path, err), created.Close(), cfg.FS.RemoveUnsynced(temp))
	}
	return temp, created.OS(), nil
}

// materialization is a memory file in the making.
type materialization struct {
	layers []*Layer
	base   io.ReaderAt
	// inPlace: the base is the file itself.
	inPlace bool
	// owners has for each page the number of its layer from 1 on, negative if it
	// is zero there; 0 is a page that no layer has.
	owners []int32
	// tasks are the frames of which some page is used, from the highest layer down.
	tasks []task
}

// task is a frame of which some page is used.
type task struct{ layer, frame int }

// newMaterialization finds out which layer each page comes from.
func newMaterialization(memoryBytes int64, layers []*Layer) (*materialization, error) {
	if err := checkChain(memoryBytes, layers); err != nil {
		return nil, err
	}
	if len(layers) == 0 || layers[0].info.Parent != "" {
		return nil, errdefs.New(errdefs.Invalid, "the lowest layer of the chain is missing")
	}
	m := &materialization{layers: layers, owners: make([]int32, memoryBytes/PageSize)}
	for i, l := range slices.Backward(layers) {
		for n := range l.frames {
			used := false
			for _, r := range l.frames[n].runs {
				owner := -int32(i) - 1
				if r.data {
					owner = -owner
				}
				for p := r.first; p < r.end(); p++ {
					if m.owners[p] == 0 {
						m.owners[p] = owner
						used = used || r.data
					}
				}
			}
			if used {
				m.tasks = append(m.tasks, task{i, n})
			}
		}
	}
	return m, nil
}

// mostReaders is how many goroutines make a file at most: they all write it,
// which one does after the other.
const mostReaders = 8

// make writes the pages; those of a new file that are zero are holes.
func (m *materialization) make(ctx context.Context, file *os.File) error {
	if m.inPlace {
		if err := m.clear(file); err != nil {
			return writeError(err)
		}
	}
	readers := min(runtime.GOMAXPROCS(0), mostReaders)
	z, err := newDecoder(readers)
	if err != nil {
		return err
	}
	return share(ctx, readers, len(m.tasks), func() func(int) error {
		var b buffers
		return func(i int) error {
			t := m.tasks[i]
			data, found := m.inBase(t, &b)
			if found && m.inPlace {
				return nil
			}
			if !found {
				var err error
				if data, err = m.layers[t.layer].load(t.frame, z, &b); err != nil {
					return err
				}
			}
			for p := range m.pieces(t) {
				if _, err := file.WriteAt(data[p.at*PageSize:][:p.count*PageSize], p.first*PageSize); err != nil {
					return writeError(err)
				}
			}
			return nil
		}
	})
}

// piece is some neighboring pages of a memory, and where they are in a payload,
// in pages.
type piece struct{ first, count, at int64 }

// pieces gives the pages with data that are used of a frame.
func (m *materialization) pieces(t task) iter.Seq[piece] {
	owner := int32(t.layer) + 1
	return func(yield func(piece) bool) {
		at := int64(0)
		for _, r := range m.layers[t.layer].frames[t.frame].runs {
			if !r.data {
				continue
			}
			for p := r.first; p < r.end(); {
				q := p
				for q < r.end() && m.owners[q] == owner {
					q++
				}
				if q > p && !yield(piece{first: p, count: q - p, at: at + p - r.first}) {
					return
				}
				p = max(q, p+1)
			}
			at += r.count
		}
	}
}
