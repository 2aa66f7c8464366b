// Package memory keeps the memory of full checkpoints as files that runs map:
// an evictable cache of what the memory layers stand for. It makes a file when
// somebody opens it, keeps it while somebody uses it, and gives its space back
// least recently used first. It decides nothing about layers, and starts no run.
//
// The life of a memory file: Open makes it under a temporary name, from the layers
// and, where the digests say that it has the same, from another memory file, and
// renames it; it is never written under that name; runs map it privately; it goes
// when it is evicted, or when it is taken to be rewritten into another one. Nothing
// waits for the disk, since it can be made again: so all files go when the host has
// booted anew, because a power cut may have left a name without its content.
//
// A file is in use while an Open of it has not been released, and while the
// catalog says that a run maps it. Whoever opens a file for a run records that
// run before the release.
package memory

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/store"
)

// DefaultMaxBytes is what files that nobody uses may take beside those in use.
const DefaultMaxBytes = 8 << 30

// trimLimit bounds the eviction that a release does.
const trimLimit = 10 * time.Second

// Records is what the cache asks the catalog.
type Records interface {
	// GetLayers gives the layers of the ids, in their order; NOT_FOUND names a
	// missing one.
	GetLayers(ctx context.Context, ids ...string) ([]catalog.Layer, error)
	// MemoryFilesInUse gives the top memory layers whose files runs map, or may
	// be about to.
	MemoryFilesInUse(ctx context.Context) ([]string, error)
}

// Config is what a cache is made with.
type Config struct {
	Home    *home.Home
	Files   *durable.FS
	Catalog Records
	// MaxBytes is what all files may take on the host before unused ones go;
	// those in use stay, however many. 0 is DefaultMaxBytes.
	MaxBytes int64
	// HostBoot is different after each boot of the host; empty asks the kernel.
	HostBoot string
	// Log is told what was evicted; nil is silent.
	Log *slog.Logger
}

// File is a memory file, which must not be written.
type File struct {
	Path string
	// Made: it was made now; else it was there.
	Made bool
}

// Cache is the memory files of a home. Its methods may be called at the same time.
type Cache struct {
	cfg Config

	mu sync.Mutex
	// touches counts opens and releases.
	touches int64
	entries map[string]*entry
}

// entry is what is known of one file; it outlives the leases.
type entry struct {
	leases int
	// touched is the number of its last open or release.
	touched int64
	// turn holds a token while one of those who opened it may make the file.
	turn chan struct{}
}

// New returns the cache of a home. What an interrupted Open left, and files of
// an earlier boot of the host, are removed: no run can be using them.
func New(cfg Config) (*Cache, error) {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = DefaultMaxBytes
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.HostBoot == "" {
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, errdefs.New(errdefs.Unsupported, "tell the boots of this host apart: %w", err)
		}
		cfg.HostBoot = strings.TrimSpace(string(b))
	}
	c := &Cache{cfg: cfg, entries: make(map[string]*entry)}
	if err := c.sweep(); err != nil {
		return nil, fmt.Errorf("prepare memory files: %w", err)
	}
	return c, nil
}

// hostBootName is the file that says in which boot of the host the others were made.
const hostBootName = "host-boot"

func (c *Cache) sweep() error {
	dir := c.cfg.Home.MemoryFiles()
	if err := c.cfg.Files.MkdirAll(dir); err != nil {
		return err
	}
	if err := c.cfg.Files.RemoveTemps(dir); err != nil {
		return err
	}
	mark := filepath.Join(dir, hostBootName)
	last, err := os.ReadFile(mark)
	if err == nil && string(last) == c.cfg.HostBoot {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errdefs.As(errdefs.Storage, err)
	}
	files, err := c.list()
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := c.cfg.Files.Remove(f.path); err != nil {
			return err
		}
	}
	return c.cfg.Files.WriteFile(mark, []byte(c.cfg.HostBoot), 0o600)
}

// Open gives the memory file of a full checkpoint and makes it if there is none:
// one caller makes it, others wait. The file stays until release is called, and
// as long as the catalog names it. STORAGE names a layer that is damaged or
// missing; NO_SPACE comes only when giving back unused files did not help.
// On error there is no new file and nothing to release.
func (c *Cache) Open(ctx context.Context, k checkpoint.Checkpoint) (File, func(), error) {
	if k.Full == nil || len(k.Full.Memory) == 0 {
		return File{}, nil, errdefs.New(errdefs.KindMismatch, "open memory of checkpoint %s: it has none", k.ID)
	}
	id := k.Full.Memory[len(k.Full.Memory)-1]
	e := c.lease(id)
	file, err := c.ensure(ctx, e, id, k.Full.Memory)
	if err != nil {
		c.release(e)
		return File{}, nil, fmt.Errorf("open memory of checkpoint %s: %w", k.ID, err)
	}
	return file, sync.OnceFunc(func() {
		c.release(e)
		if file.Made {
			c.trim(context.WithoutCancel(ctx))
		}
	}), nil
}

// trim evicts what a file that was made has made too much: after its release,
// because whoever opened it is in a hurry.
func (c *Cache) trim(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, trimLimit)
	defer cancel()
	if err := c.Evict(ctx); err != nil {
		c.cfg.Log.Warn("could not evict memory files", "err", err)
	}
}

func (c *Cache) release(e *entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.touches++
	e.leases--
	e.touched = c.touches
}

func (c *Cache) lease(id string) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[id]
	if e == nil {
		e = &entry{turn: make(chan struct{}, 1)}
		c.entries[id] = e
	}
	c.touches++
	e.leases++
	e.touched = c.touches
	return e
}

// begin waits until nobody else makes or checks the file.
func (e *entry) begin(ctx context.Context) (done func(), err error) {
	select {
	case e.turn <- struct{}{}:
		return func() { <-e.turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// ensure makes the file unless it is there; the caller has a lease.
func (c *Cache) ensure(ctx context.Context, e *entry, id string, layers []string) (File, error) {
	done, err := e.begin(ctx)
	if err != nil {
		return File{}, err
	}
	defer done()
	file := File{Path: c.path(id)}
	st, err := os.Lstat(file.Path)
	if err == nil && st.Mode().IsRegular() && !c.whole(ctx, st.Size(), id) {
		c.cfg.Log.Warn("a memory file has the wrong size; it is made anew", "file", file.Path)
		if err = c.cfg.Files.RemoveUnsynced(file.Path); err == nil {
			err = fs.ErrNotExist
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		file.Made = true
		err = c.materialize(ctx, file.Path, layers)
		if errdefs.Is(err, errdefs.NoSpace) && c.makeRoom(ctx) {
			err = c.materialize(ctx, file.Path, layers)
		}
		if err != nil {
			return file, err
		}
	case err != nil:
		return File{}, errdefs.As(errdefs.Storage, err)
	case !st.Mode().IsRegular():
		return File{}, errdefs.New(errdefs.Storage, "memory file %q is not a regular file; remove it", file.Path)
	}
	now := time.Now()
	if err := os.Chtimes(file.Path, now, now); err != nil { // for the order of eviction
		return File{}, errdefs.As(errdefs.Storage, err)
	}
	return file, nil
}

// whole reports whether a file of the size can hold the memory of the layer.
func (c *Cache) whole(ctx context.Context, size int64, id string) bool {
	layers, err := c.cfg.Catalog.GetLayers(ctx, id)
	return err != nil || layers[0].VirtualBytes == 0 || layers[0].VirtualBytes == size
}

func (c *Cache) path(id string) string { return filepath.Join(c.cfg.Home.MemoryFiles(), id) }

func (c *Cache) materialize(ctx context.Context, path string, ids []string) error {
	records, err := c.cfg.Catalog.GetLayers(ctx, ids...)
	if err != nil {
		return err
	}
	layers, done, err := c.open(records)
	if err != nil {
		return err
	}
	defer done()
	size := layers[0].Info().MemoryBytes
	cfg := store.MaterializeConfig{FS: c.cfg.Files, Path: path, MemoryBytes: size, Layers: layers, Unsynced: true}
	sample, err := store.NewSample(size, layers)
	if err != nil {
		return err
	}
	if cfg.Spare = c.spare(ctx, size, sample); cfg.Spare == "" {
		if base := c.base(ids, size, sample); base != nil {
			defer base.Close()
			cfg.Base = base
		}
	}
	return store.Materialize(ctx, cfg)
}

// View shows the memory that layers, lowest first and all of a chain, stand for,
// until the function is called. Without layers it is nil: all is zero.
func (c *Cache) View(_ context.Context, layers []catalog.Layer) (*store.View, func(), error) {
	if len(layers) == 0 {
		return nil, func() {}, nil
	}
	opened, done, err := c.open(layers)
	if err != nil {
		return nil, nil, err
	}
	view, err := store.NewView(nil, opened[0].Info().MemoryBytes, opened...)
	if err != nil {
		done()
		return nil, nil, err
	}
	return view, done, nil
}

// open opens the files of layers, which must be those that were recorded.
func (c *Cache) open(records []catalog.Layer) (layers []*store.Layer, done func(), err error) {
	done = func() {
		for _, l := range layers {
			_ = l.Close() // nothing was written
		}
	}
	for i, r := range records {
		path := filepath.Join(c.cfg.Home.Dir(), filepath.FromSlash(r.Path))
		l, err := store.Open(path)
		if errdefs.Is(err, errdefs.NotFound) {
			err = errdefs.New(errdefs.Storage, "memory layer %q is missing", path)
		}
		if err == nil {
			layers = append(layers, l)
			err = checkRecorded(l.Info(), r, path, i == 0)
		}
		if err != nil {
			done()
			return nil, nil, err
		}
	}
	return layers, done, nil
}

// checkRecorded refuses a sound layer in the place of another one.
func checkRecorded(info store.Info, r catalog.Layer, path string, lowest bool) error {
	if info.ID != r.ID || r.Digest != "" && info.Digest.String() != r.Digest || lowest && info.Parent != "" {
		return errdefs.New(errdefs.Storage, "memory layer %q is not the one that was recorded", path)
	}
	return nil
}
