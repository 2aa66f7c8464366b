// Package book keeps which pages of a run's memory were written since the last
// published capture, and between which captures a set of them means something.
// It finds none itself: package dirty does.
package book

import (
	"sync"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Epoch names one stretch of a run between two published captures. A set of
// pages means something only together with its epoch.
type Epoch struct {
	RunID string `json:"run_id"`
	// Parent is the checkpoint since which pages are counted; empty when the
	// run has none, and then they are counted since its memory file.
	Parent string `json:"parent,omitempty"`
	// Number counts the published captures and the lost sets of this run.
	Number uint64 `json:"number"`
}

// Book keeps, for one run, the pages that were written since the last
// published capture. Its life: New when the run is attached to; Rebase
// with what dirty.Tracker.Arm returned; Add with each scan; Begin, Capture.Seal and
// one of Capture.Publish and Capture.Abandon for each capture, one at a time.
// Lost when a scan failed, which makes the set unknown until the next Rebase:
// it is never guessed. Its methods may be called at the same time.
type Book struct {
	mu    sync.Mutex
	epoch Epoch
	// since has all pages written since epoch.Parent, but those in current.
	since *dirty.Set
	// known is false while since may lack pages.
	known   bool
	current *Capture
}

// New begins the book of a run whose memory file holds the memory of
// parent, or of no checkpoint when that is empty. The set is unknown.
func New(runID, parent string, memoryBytes int64) *Book {
	return &Book{epoch: Epoch{RunID: runID, Parent: parent}, since: dirty.NewSet(memoryBytes)}
}

// Epoch is the one that a capture would belong to now.
func (b *Book) Epoch() Epoch {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.epoch
}

// Known reports whether the set is known; when not, the next capture has to
// Arm the tracker and Rebase.
func (b *Book) Known() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.known
}

// Pages is a copy of the set as it is now.
func (b *Book) Pages() *dirty.Set {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.since.Clone()
}

// Add notes that pages were written.
func (b *Book) Add(pages *dirty.Set) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.since.Or(pages)
}

// Rebase makes the set known: pages are all that differ from the run's memory
// file, as dirty.Tracker.Arm returns them. This may be more than what was written
// since the parent, never less.
func (b *Book) Rebase(pages *dirty.Set) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.since.Or(pages)
	b.known = true
}

// Lost notes that pages may have been written that nobody knows of. The epoch
// ends, so that a capture which was prepared in it is refused.
func (b *Book) Lost() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.known = false
	b.epoch.Number++
}

// Begin begins the capture of the epoch that the caller prepared for.
// MACHINE_BUSY while another one is undecided; CONFLICT when the epoch has
// ended: ask for Epoch anew.
func (b *Book) Begin(want Epoch) (*Capture, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.current != nil {
		return nil, errdefs.New(errdefs.MachineBusy,
			"begin capture of run %s: another capture is not published yet; wait for it", b.epoch.RunID)
	}
	if want != b.epoch {
		return nil, errdefs.New(errdefs.Conflict,
			"begin capture of run %s: it is in epoch %d after checkpoint %q, not in %d of run %s after %q; begin again",
			b.epoch.RunID, b.epoch.Number, b.epoch.Parent, want.Number, want.RunID, want.Parent)
	}
	b.current = &Capture{book: b}
	return b.current, nil
}

// Capture is the one capture of a Book that may be under way. Exactly one of
// Publish and Abandon ends it; after that its methods do nothing, so that a
// deferred Abandon is allowed.
type Capture struct {
	book   *Book
	sealed *dirty.Set
	ended  bool
}

// Seal ends the set at this instant, inside the window and after the last
// scan was added: it returns all pages written since the parent, and what is
// added from now on belongs to the next capture. The caller must not change
// the set. WRONG_STATE while the set is unknown, or when it was sealed already.
func (c *Capture) Seal() (*dirty.Set, error) {
	b := c.book
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case c.ended || c.sealed != nil:
		return nil, errdefs.New(errdefs.WrongState, "seal capture of run %s: it is sealed or ended already", b.epoch.RunID)
	case !b.known:
		return nil, errdefs.New(errdefs.WrongState,
			"seal capture of run %s: which pages changed is unknown; arm the tracking again and rebase", b.epoch.RunID)
	}
	c.sealed = b.since
	b.since = dirty.NewSet(c.sealed.MemoryBytes())
	return c.sealed, nil
}

// Publish ends the capture: it is the checkpoint with this id now, and the
// parent of the next one. WRONG_STATE if it was never sealed.
func (c *Capture) Publish(id string) error {
	b := c.book
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.ended || c.sealed == nil {
		return errdefs.New(errdefs.WrongState, "publish capture of run %s: it is not sealed or has ended", b.epoch.RunID)
	}
	c.ended, b.current = true, nil
	b.epoch.Parent = id
	b.epoch.Number++
	return nil
}

// Abandon ends the capture without a checkpoint: its pages count as written
// since the old parent again.
func (c *Capture) Abandon() {
	b := c.book
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.ended {
		return
	}
	c.ended, b.current = true, nil
	if c.sealed != nil {
		b.since.Or(c.sealed)
	}
}
