package machinetest

import (
	"bytes"
	"slices"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakememory"
)

// guestMemory is the guest's memory as the machine's process has it. It has a
// lock of its own: memory can be read while the machine hangs.
type guestMemory struct {
	root string

	mu   sync.Mutex
	kept fakememory.Kept
	// running is the time of the resume while the guest runs; zero else.
	running time.Time
	// file is the image in the run's memory file, which begins with zeros for
	// the memory of a boot.
	file []byte
	// last is the image at the last arm or scan; nil when not armed.
	last []byte
}

// pageRun is count pages from first on.
type pageRun struct{ First, Count int64 }

// image is the memory as of now.
func (g *guestMemory) image() ([]byte, error) {
	kept := g.kept
	if !g.running.IsZero() {
		kept.Ran += time.Since(g.running)
	}
	return fakememory.Encode(g.root, kept)
}

// run says that the guest runs from now on, stop that it stands still.
func (g *guestMemory) run() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running = time.Now()
}

func (g *guestMemory) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.kept.Ran += time.Since(g.running)
	g.running = time.Time{}
}

// now is image for those who do not hold the lock.
func (g *guestMemory) now() ([]byte, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.image()
}

// change changes what the guest's agent knows.
func (g *guestMemory) change(f func(*fakememory.Kept)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f(&g.kept)
}

// arm begins to track and gives the pages that differ from the memory file.
func (g *guestMemory) arm() ([]pageRun, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	image, err := g.image()
	if err != nil {
		return nil, err
	}
	g.last = image
	return differ(g.file, image), nil
}

// scan gives the pages that changed since arm or scan.
func (g *guestMemory) scan() ([]pageRun, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.last == nil {
		return nil, errdefs.New(errdefs.WrongState, "the tracking is not armed")
	}
	image, err := g.image()
	if err != nil {
		return nil, err
	}
	changed := differ(g.last, image)
	g.last = image
	return changed, nil
}

// read gives up to length bytes from offset on; what is missing is zeros.
func (g *guestMemory) read(offset, length int64) ([]byte, error) {
	image, err := g.now()
	if err != nil || offset >= int64(len(image)) {
		return nil, err
	}
	return image[offset:min(offset+length, int64(len(image)))], nil
}

// differ gives the pages in which two images differ; zeros follow both.
func differ(a, b []byte) (runs []pageRun) {
	page := func(image []byte, n int64) []byte {
		if n*fakememory.PageSize >= int64(len(image)) {
			return nil
		}
		return image[n*fakememory.PageSize : (n+1)*fakememory.PageSize]
	}
	zeros := make([]byte, fakememory.PageSize)
	for n := range int64(max(len(a), len(b)) / fakememory.PageSize) {
		was, is := page(a, n), page(b, n)
		if bytes.Equal(slices.Concat(was, zeros)[:fakememory.PageSize], slices.Concat(is, zeros)[:fakememory.PageSize]) {
			continue
		}
		if last := len(runs) - 1; last >= 0 && runs[last].First+runs[last].Count == n {
			runs[last].Count++
		} else {
			runs = append(runs, pageRun{n, 1})
		}
	}
	return runs
}

// guestClock is the guest's wall clock, which stands still while the vCPUs do.
type guestClock struct {
	// behind is how much it is behind the host's, stopped the host's time since
	// which it stands still; zero while it runs, and before a boot.
	behind  time.Duration
	stopped time.Time
}

func (c *guestClock) stop() { c.stopped = time.Now() }

func (c *guestClock) run() {
	if !c.stopped.IsZero() {
		c.behind += time.Since(c.stopped)
	}
	c.stopped = time.Time{}
}

// now is the guest's time.
func (c *guestClock) now() time.Time {
	host := c.stopped
	if host.IsZero() {
		host = time.Now()
	}
	return host.Add(-c.behind)
}
