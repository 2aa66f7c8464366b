package dirty

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Config says which process to look into.
type Config struct {
	// PID is the process. The caller makes sure that it is the right one, as
	// its parent or by its start time.
	PID int
	// MemoryFile is the path of the file that is the guest's memory. The
	// process maps it privately, once from end to end.
	MemoryFile string
	// MemoryBytes is its size, a multiple of PageSize.
	MemoryBytes int64
	// Spare is a descriptor that the process has inherited, of the memory file
	// and open only for reading, for ReadOnly to use up; 0 for none.
	Spare int
	// Strategy is the one to use; empty is the best that works here.
	Strategy Strategy
}

// Tracker tells which pages of one process's guest memory were written. Its
// life: Attach; Arm; Scan any number of times; Arm again whenever the set was
// lost; Close, which leaves the process as it is. Unless Strategy.Live, the
// guest must be stopped during Arm and Scan. Its methods may be called at the same time. An
// error of a process that has ended is of kind WRONG_STATE.
type Tracker struct {
	strategy Strategy

	mu    sync.Mutex
	p     *process
	by    method
	armed bool
}

// method is one strategy at work.
type method interface {
	// arm calls private for the pages that are the process's own and tracks
	// from then on.
	arm(private func(first, count int64)) error
	// scan calls visit for the pages written since arm or scan.
	scan(visit func(first, count int64)) error
	close()
}

// Attach prepares to track a process, armed or not by an earlier Tracker of
// another process; the guest may run. UNSUPPORTED when the host does not allow
// to look into the process or has not got the strategy; nothing was changed then.
func Attach(ctx context.Context, cfg Config) (*Tracker, error) {
	if cfg.MemoryBytes <= 0 || cfg.MemoryBytes%PageSize != 0 {
		return nil, errdefs.New(errdefs.Invalid, "track process %d: memory of %d bytes is not whole pages", cfg.PID, cfg.MemoryBytes)
	}
	strategy := cfg.Strategy
	if strategy == "" {
		strategy = Best(Probe())
	}
	p, err := openProcess(cfg)
	if err != nil {
		return nil, err
	}
	t := &Tracker{strategy: strategy, p: p}
	switch strategy {
	case Userfaultfd:
		t.by, err = newUserfault(ctx, p)
	case SoftDirty:
		t.by, err = newSoftDirty(p)
	case Untracked:
		t.by = untracked{p}
	default:
		err = errdefs.New(errdefs.Invalid, "strategy %q: use %s, %s or %s", strategy, Userfaultfd, SoftDirty, Untracked)
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("track process %d: %w", cfg.PID, err)
	}
	return t, nil
}

// Strategy is the one in use.
func (t *Tracker) Strategy() Strategy { return t.strategy }

// Arm begins to track, or begins anew, and returns all pages that are the
// process's own, which are those that may differ from the memory file. What is
// written after that is in a later Scan, so that the two never lose a write.
func (t *Tracker) Arm() (*Set, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.by == nil {
		return nil, t.closed()
	}
	t.armed = false
	set := NewSet(t.p.size)
	if err := t.by.arm(set.Add); err != nil {
		return nil, fmt.Errorf("arm tracking of process %d: %w", t.p.pid, err)
	}
	t.armed = true
	return set, nil
}

// Scan returns the pages written since the last Arm or Scan; with Untracked,
// since the run began. After an error the set is lost. WRONG_STATE before Arm.
func (t *Tracker) Scan() (*Set, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.by == nil {
		return nil, t.closed()
	}
	if !t.armed {
		return nil, errdefs.New(errdefs.WrongState, "scan process %d: its tracking is not armed; pause it and arm it first", t.p.pid)
	}
	set := NewSet(t.p.size)
	if err := t.by.scan(set.Add); err != nil {
		t.armed = false
		return nil, fmt.Errorf("scan process %d: %w", t.p.pid, err)
	}
	return set, nil
}

// ReadAt reads the guest's memory at an offset, as io.ReaderAt. It counts as
// no write and does not stop the guest.
func (t *Tracker) ReadAt(b []byte, off int64) (int, error) {
	t.mu.Lock()
	p := t.p
	t.mu.Unlock()
	if p == nil {
		return 0, errdefs.New(errdefs.WrongState, "read guest memory: the tracker is closed")
	}
	return p.readAt(b, off)
}

// Close lets go of the process. Its tracking goes on and can be found again by
// Attach, after which it has to be armed. Nobody may be in ReadAt.
func (t *Tracker) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.by != nil {
		t.by.close()
		t.p.close()
		t.by, t.p, t.armed = nil, nil, false
	}
	return nil
}

func (t *Tracker) closed() error {
	return errdefs.New(errdefs.WrongState, "track guest memory: the tracker is closed")
}

// errNoStrategy is what a kernel gives that lacks a part of a strategy.
var errNoStrategy = errors.New("this kernel does not have it")
