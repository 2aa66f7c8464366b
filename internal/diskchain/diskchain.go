// Package diskchain turns the recorded layers of a machine's disk into the
// files that a run opens: the layers themselves, or, where there are many, one
// file that the lower ones were merged into. Merged files are a cache: they can
// be made again, and no layer depends on them. It records nothing and changes
// no layer.
package diskchain

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// MaxOpen is how many files of a chain a run opens at most when it begins, the
// image included: QEMU starts with 20 layers in 91 ms, with one in 80, with 100
// in 814 (measured, QEMU 7.2).
const MaxOpen = 20

// step is the grain of merged prefixes, in layers: chains that grow by a layer
// at a time share most of their merged files.
const step = 8

// Merger makes one layer of several.
type Merger interface {
	// Merge makes a file at path that shows over below what the layers show,
	// complete or not at all.
	Merge(ctx context.Context, below, layers []disk.Layer, path string) error
}

// Config is what Chains works with.
type Config struct {
	Home  *home.Home
	Files *durable.FS
	// Merger is nil where disks cannot be merged; long chains stay long then.
	Merger Merger
	Log    *slog.Logger
}

// Chains opens the chains of all machines of a home.
type Chains struct {
	cfg Config

	// merging is held while a merge runs: one at a time, so that two runs of
	// one chain make its merged file once.
	merging sync.Mutex
}

// New returns Chains.
func New(cfg Config) *Chains { return &Chains{cfg: cfg} }

// Open gives the files of a chain over the image's root disk, lowest first, the
// last one being the writable top. A long chain is merged first; where that
// fails, which is logged, the chain is given as it is.
func (c *Chains) Open(ctx context.Context, root machine.Layer, layers []catalog.Layer) ([]machine.Layer, error) {
	files := make([]disk.Layer, len(layers))
	for i, l := range layers {
		files[i] = disk.Layer{ID: l.ID, Path: filepath.Join(c.cfg.Home.Dir(), filepath.FromSlash(l.Path)), Format: l.Format}
	}
	if len(files)+1 > MaxOpen && c.cfg.Merger != nil {
		short, err := c.shorten(ctx, disk.Layer(root), files)
		switch {
		case err == nil:
			files = short
		case ctx.Err() != nil:
			return nil, err
		default:
			c.cfg.Log.Warn("merge a long disk chain", "layers", len(files), "error", err)
		}
	}
	chain := []machine.Layer{root}
	for _, f := range files {
		chain = append(chain, machine.Layer(f))
	}
	return chain, nil
}

// shorten replaces the longest prefix of whole steps below the top by its
// merged file.
func (c *Chains) shorten(ctx context.Context, root disk.Layer, files []disk.Layer) ([]disk.Layer, error) {
	c.merging.Lock()
	defer c.merging.Unlock()
	count := (len(files) - 1) / step * step
	want := c.merged(files[:count])
	if !exists(want.Path) {
		from, have := files[:count], 0
		for n := count - step; n > 0; n -= step {
			if m := c.merged(files[:n]); exists(m.Path) {
				from, have = append([]disk.Layer{m}, files[n:count]...), n
				break
			}
		}
		if err := c.cfg.Files.MkdirAll(c.cfg.Home.MergedDisks()); err != nil {
			return nil, err
		}
		c.cfg.Log.Info("merging a long disk chain", "layers", count, "merged_before", have)
		if err := c.cfg.Merger.Merge(ctx, []disk.Layer{root}, from, want.Path); err != nil {
			return nil, err
		}
	}
	return append([]disk.Layer{want}, files[count:]...), nil
}

// merged is the file that the layers are merged into, or would be. Its name is
// made of their ids, in order: layers never change.
func (c *Chains) merged(layers []disk.Layer) disk.Layer {
	hash := sha256.New()
	for _, l := range layers {
		hash.Write([]byte(l.ID + "\n"))
	}
	id := hex.EncodeToString(hash.Sum(nil)[:8])
	return disk.Layer{ID: "merged-" + id, Path: filepath.Join(c.cfg.Home.MergedDisks(), id+".qcow2"), Format: disk.Qcow2}
}

// Sweep removes the merged files that no run uses, as used tells by path. What
// a chain still wants is made again when it is opened next.
func (c *Chains) Sweep(used func(path string) bool) error {
	c.merging.Lock()
	defer c.merging.Unlock()
	entries, err := os.ReadDir(c.cfg.Home.MergedDisks())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errdefs.New(errdefs.Storage, "list merged disks: %w", err)
	}
	var failed error
	for _, e := range entries {
		path := filepath.Join(c.cfg.Home.MergedDisks(), e.Name())
		if !used(path) {
			failed = errors.Join(failed, c.cfg.Files.Remove(path))
		}
	}
	return failed
}

func exists(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().IsRegular()
}
