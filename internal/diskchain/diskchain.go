// Package diskchain turns the recorded layers of a machine's disk into the
// files that a run opens: the layers themselves, and files that many of them
// were merged into, so that there are few. Merged files are a cache: they can be
// made again, and no layer depends on them. It records nothing and changes no
// layer.
//
// A merged file is called by the first and the last layer it stands for. That
// says all: a layer is written over one chain and never over another.
//
// What is merged next are the layers that are in no merged file yet, once there
// are some, and with them those merged files just below that are not much
// larger than all above. So files become larger from the top down, their number
// grows with the logarithm of what was written, and so does how often a byte is copied.
package diskchain

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"sync"
	"time"

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

// step is how many layers that are in no merged file make a merge worth it
// while a run has them open: in a window QEMU looks at each, 0.07 ms (measured).
const step = 8

// growth is how much larger than all above it, at most, a merged file is that
// is merged again.
const growth = 2

// What nobody waits for is merged at so many bytes per second, zeros included,
// more where the host has little to do, and only where there is room for twice
// what is merged, and so much more.
const (
	busySpeed      = 20 << 20
	idleSpeed      = 200 << 20
	backgroundRoom = 1 << 30
)

// Merger makes one layer of several.
type Merger interface {
	// Merge makes the file, complete or not at all.
	Merge(ctx context.Context, m disk.Merge) error
}

// Config is what Chains works with.
type Config struct {
	Home  *home.Home
	Files *durable.FS
	// Merger is nil where disks cannot be merged; long chains stay long then.
	Merger Merger
	// Idle reports whether the host has little to do.
	Idle func() bool
	Log  *slog.Logger
}

// Chains opens the chains of all machines of a home.
type Chains struct {
	cfg Config

	// merging is held while a merge runs: one at a time, so that two runs of
	// one chain make its merged file once.
	merging sync.Mutex

	mu sync.Mutex
	// interrupt ends the merge under way if nobody waits for it; nil for none.
	interrupt context.CancelCauseFunc
	// replacing is the merged file that is being put in the place of others.
	replacing string
	// opened says when merged files were given out last: their runs may be about
	// to begin.
	opened map[string]time.Time
}

// beginning is how long a run may take to begin, and record what it has open.
const beginning = 10 * time.Minute

// New returns Chains.
func New(cfg Config) *Chains { return &Chains{cfg: cfg, opened: map[string]time.Time{}} }

// Open gives the files of a chain over the image's root disk, lowest first, the
// last one being the writable top. A long chain is merged first; where that
// fails, which is logged, the chain is given as it is.
func (c *Chains) Open(ctx context.Context, root machine.Layer, layers []catalog.Layer) ([]machine.Layer, error) {
	all := c.files(layers)
	files := c.cover(all)
	if len(files)+1 > MaxOpen && c.cfg.Merger != nil {
		short, err := c.shorten(ctx, root, all)
		switch {
		case err == nil:
			files = short
		case ctx.Err() != nil:
			return nil, err
		default:
			c.cfg.Log.Warn("merge a long disk chain", "layers", len(layers), "error", err)
		}
	}
	for !c.giveOut(files) {
		files = c.cover(all) // what was merged has been removed meanwhile
	}
	chain := []machine.Layer{root}
	for _, f := range files {
		chain = append(chain, machine.Layer(f.Layer))
	}
	return chain, nil
}

// giveOut spares the merged ones of the files until their run has begun, and
// reports whether they are all there.
func (c *Chains) giveOut(files []file) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range files {
		if f.isLayer() {
			continue
		}
		if !f.sound() {
			return false
		}
		c.opened[f.Path] = time.Now()
	}
	return true
}

// Replacement says what to put in the place of which layers of a run's disk.
type Replacement struct {
	// FirstID and LastID are the lowest and the highest of them.
	FirstID, LastID string
	Merged          machine.Layer
}

// Shorten merges layers that a run has open, if that is worth it now, and has
// replace put the merged one in their place. open are the ids of the run's disk,
// lowest first, and layers those that are recorded; when they do not fit
// together, because the machine has changed meanwhile, nothing is worth it, nor
// is it where space runs out. It ends with context.Canceled when an Open has to
// merge something.
func (c *Chains) Shorten(ctx context.Context, root machine.Layer, layers []catalog.Layer, open []string, replace func(Replacement) error) (shorter bool, err error) {
	files, fits := c.current(c.files(layers), open)
	if !fits || c.cfg.Merger == nil || !Worth(open) {
		return false, nil
	}
	from, to := next(files), len(files)-1
	if !c.room(files[from:to]) {
		return false, nil
	}
	ctx, done := c.interruptible(ctx)
	defer done()
	stop := c.watchRoom(ctx)
	merged, err := c.mergeAside(ctx, root, files, from)
	stop()
	if err != nil {
		return false, err
	}
	return true, replace(Replacement{FirstID: files[from].ID, LastID: files[to-1].ID, Merged: machine.Layer(merged.Layer)})
}

// mergeAside merges what nobody waits for. The file is spared until the context
// is done with.
func (c *Chains) mergeAside(ctx context.Context, root machine.Layer, files []file, from int) (file, error) {
	c.merging.Lock()
	defer c.merging.Unlock()
	speed := int64(busySpeed)
	if c.cfg.Idle() {
		speed = idleSpeed
	}
	merged, err := c.merge(ctx, root, files, from, speed)
	if errdefs.Is(context.Cause(ctx), errdefs.NoSpace) {
		err = context.Cause(ctx)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.replacing = merged.Path
	return merged, err
}

// room reports whether the files can be merged without anybody missing the space.
func (c *Chains) room(part []file) bool {
	var sum int64
	for _, f := range part {
		sum += size(f)
	}
	free, err := durable.FreeBytes(c.cfg.Home.Cache())
	return err == nil && free > 2*sum+backgroundRoom
}

// roomTick is how often a merge in the background looks whether there still is room.
const roomTick = time.Second

// watchRoom interrupts the merge that is interruptible, until stop is called,
// when machines would soon miss what it takes.
func (c *Chains) watchRoom(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		tick := time.NewTicker(roomTick)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			if free, err := durable.FreeBytes(c.cfg.Home.Cache()); err == nil && free < backgroundRoom/2 {
				c.end(errdefs.New(errdefs.NoSpace, "%s has %d MiB free", c.cfg.Home.Cache(), free>>20))
				return
			}
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

// end ends the merge under way if nobody waits for it.
func (c *Chains) end(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.interrupt != nil {
		c.interrupt(why)
	}
}

// interruptible makes a context that end ends.
func (c *Chains) interruptible(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	set := func(f context.CancelCauseFunc) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.interrupt, c.replacing = f, ""
	}
	set(cancel)
	return ctx, func() {
		set(nil)
		cancel(nil)
	}
}

// shorten merges layers until few files stand for all.
func (c *Chains) shorten(ctx context.Context, root machine.Layer, all []file) ([]file, error) {
	c.end(context.Canceled)
	c.merging.Lock()
	defer c.merging.Unlock()
	for {
		files := c.cover(all) // somebody else may have merged meanwhile
		if len(files)+1 <= MaxOpen {
			return files, nil
		}
		from := 0
		if unmerged(files) > 1 {
			from = next(files)
		}
		if _, err := c.merge(ctx, root, files, from, 0); err != nil {
			return nil, err
		}
	}
}

// merge merges the files from the given one up to the top, without it, unless
// that was done before.
func (c *Chains) merge(ctx context.Context, root machine.Layer, files []file, from int, bytesPerSecond int64) (file, error) {
	part := files[from : len(files)-1]
	merged := c.merged(part[0].first, part[len(part)-1].last)
	if merged.sound() {
		return merged, nil
	}
	if err := c.cfg.Files.MkdirAll(c.cfg.Home.MergedDisks()); err != nil {
		return merged, err
	}
	c.cfg.Log.Info("merging layers of a disk", "files", len(part), "of", len(files)-1, "into", merged.ID)
	err := c.cfg.Merger.Merge(ctx, disk.Merge{
		Below: append([]disk.Layer{disk.Layer(root)}, plain(files[:from])...), Layers: plain(part), Path: merged.Path, BytesPerSecond: bytesPerSecond,
	})
	if err != nil {
		return merged, err
	}
	return merged, merged.stamp(ctx, c.cfg.Files)
}

// Check reads the merged files that stand for the layers, and gives up those that
// are not what was merged: the layers then stand for themselves until they are
// merged again.
func (c *Chains) Check(ctx context.Context, layers []catalog.Layer) error {
	for _, f := range c.cover(c.files(layers)) {
		if f.isLayer() {
			continue
		}
		same, err := f.check(ctx)
		switch {
		case err != nil:
			return err
		case !same:
			c.cfg.Log.Error("a merged disk is damaged; it is given up", "file", f.Path)
			if err := c.drop(f.Path); err != nil {
				return err
			}
		}
	}
	return nil
}

// drop removes a merged file and its stamp, the stamp first.
func (c *Chains) drop(path string) error {
	return errors.Join(remove(c.cfg.Files, stampOf(path)), remove(c.cfg.Files, path))
}

func remove(files *durable.FS, path string) error {
	if err := files.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
