//go:build linux

// Package freeze holds back all writes to the guest's file systems for a moment,
// so that its disk is at rest while the host switches it. It thaws them by its
// own timer, whoever has died meanwhile, and says whether they were still frozen
// when they were thawed. What the moment is used for is not its business.
package freeze

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// MaxLimit bounds how long file systems can be kept frozen.
const MaxLimit = 10 * time.Second

// FileSystem is one that can be frozen.
type FileSystem interface {
	// Name is where it is mounted, for people.
	Name() string
	// Sync writes what waits to be written, so that Freeze has little to do.
	Sync() error
	// Freeze holds writes back. WRONG_STATE: it is frozen already.
	Freeze() error
	// Thaw lets them go; wasFrozen is false where somebody else had done so.
	Thaw() (wasFrozen bool, err error)
	Close() error
}

// Config is what a Freezer works with.
type Config struct {
	// FileSystems opens those that a disk is written by, in the order of mounting;
	// nil for none.
	FileSystems func() ([]FileSystem, error)
	// Hooks runs those of the guest's own programs that want to know; verb is
	// freeze or thaw. nil runs none.
	Hooks func(ctx context.Context, verb string) error
}

// Freezer freezes a guest. Freezes follow each other.
type Freezer struct {
	cfg Config
	// one is held from Freeze until its Frozen has ended.
	one chan struct{}
}

// New returns a Freezer.
func New(cfg Config) *Freezer { return &Freezer{cfg: cfg, one: make(chan struct{}, 1)} }

// Report says what was done before writes were held back, and for how long they were.
type Report struct {
	Hooks, Sync time.Duration
	// Freeze is from the first freeze to the last, and a part of Frozen, which
	// is to the last thaw.
	Freeze, Frozen time.Duration
	// Failed is what went wrong with hooks, which is for the caller to judge.
	Failed error
}

// Frozen is a guest whose file systems are frozen. Its life: Freeze returns it,
// and Thaw ends it; the limit thaws the file systems before that.
type Frozen struct {
	freezer *Freezer
	timer   *time.Timer
	all     []FileSystem

	mu      sync.Mutex
	frozen  []FileSystem
	began   time.Time
	report  Report
	expired bool
	// lost says that one was thawed by others, or could not be.
	lost error
}

// Order is what a freeze is asked for.
type Order struct {
	// Limit is how long the file systems may be frozen, up to MaxLimit.
	Limit time.Duration
	// AllowHookFailure freezes them also when a hook fails.
	AllowHookFailure bool
}

// Freeze runs the hooks, writes out what waits, and freezes all file systems, the
// last mounted first. On error none is frozen. CONFLICT: they are frozen by
// another call; WRONG_STATE: by somebody in the guest; DEADLINE: it took longer
// than the limit.
func (f *Freezer) Freeze(ctx context.Context, o Order) (*Frozen, error) {
	if o.Limit <= 0 || o.Limit > MaxLimit {
		return nil, errdefs.New(errdefs.Invalid, "freeze: a limit of %s; use one up to %s", o.Limit, MaxLimit)
	}
	select {
	case f.one <- struct{}{}:
	default:
		return nil, errdefs.New(errdefs.Conflict, "freeze: the file systems are being frozen already; try again")
	}
	z := &Frozen{freezer: f}
	began := time.Now()
	z.report.Failed = f.hooks(ctx, "freeze")
	z.report.Hooks = time.Since(began)
	err := z.report.Failed
	if err == nil || o.AllowHookFailure {
		err = z.freeze(ctx, o.Limit)
	}
	if err != nil {
		z.end(ctx)
		return nil, err
	}
	return z, nil
}

func (f *Freezer) hooks(ctx context.Context, verb string) error {
	if f.cfg.Hooks == nil {
		return nil
	}
	return f.cfg.Hooks(ctx, verb)
}

// freeze freezes what there is; on error it is all thawed.
func (z *Frozen) freeze(ctx context.Context, limit time.Duration) (err error) {
	if z.freezer.cfg.FileSystems != nil {
		if z.all, err = z.freezer.cfg.FileSystems(); err != nil {
			return err
		}
	}
	syncing := time.Now()
	for _, fs := range z.all {
		if err := fs.Sync(); err != nil {
			return errdefs.New(errdefs.Storage, "freeze: write out %s: %w", fs.Name(), err)
		}
	}
	z.report.Sync = time.Since(syncing)
	if err := ctx.Err(); err != nil {
		return err
	}
	z.began = time.Now()
	z.timer = time.AfterFunc(limit, z.expire)
	for _, fs := range slices.Backward(z.all) {
		if err := z.add(fs); err != nil {
			z.timer.Stop()
			z.thaw()
			return err
		}
	}
	z.report.Freeze = time.Since(z.began)
	return nil
}

// add freezes one more. Where that took too long, it is not left so: the timer
// does not know of it yet.
func (z *Frozen) add(fs FileSystem) error {
	if err := fs.Freeze(); err != nil {
		return err
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if !z.expired {
		z.frozen = append(z.frozen, fs)
		return nil
	}
	_, err := fs.Thaw()
	return errors.Join(errdefs.New(errdefs.Deadline, "freeze: %s was not frozen within the limit: much is being written", fs.Name()), err)
}

// expire is the timer's.
func (z *Frozen) expire() {
	z.mu.Lock()
	z.expired = true
	z.mu.Unlock()
	z.thaw()
}

// thaw lets go of all that is frozen, the last frozen first.
func (z *Frozen) thaw() {
	z.mu.Lock()
	defer z.mu.Unlock()
	for _, fs := range slices.Backward(z.frozen) {
		was, err := fs.Thaw()
		switch {
		case err != nil:
			z.lost = errors.Join(z.lost, errdefs.New(errdefs.Storage, "thaw %s: %w", fs.Name(), err))
		case !was:
			z.lost = errors.Join(z.lost, errdefs.New(errdefs.Conflict, "%s was thawed in the machine meanwhile", fs.Name()))
		}
	}
	if z.frozen = nil; z.report.Frozen == 0 {
		z.report.Frozen = time.Since(z.began)
	}
}

// Thaw lets the file systems go, runs the hooks, and says where the time went.
// DEADLINE: they were thawed by the limit before, CONFLICT: by somebody in the
// guest; what was done meanwhile was not done at rest.
func (z *Frozen) Thaw(ctx context.Context) (Report, error) {
	z.timer.Stop()
	z.thaw()
	z.end(ctx)
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.expired {
		return z.report, errors.Join(errdefs.New(errdefs.Deadline, "the file systems thawed themselves, after their limit"), z.lost)
	}
	return z.report, z.lost
}

// end runs the hooks, whatever became of the caller, and lets the next one freeze.
func (z *Frozen) end(ctx context.Context) {
	failed := z.freezer.hooks(context.WithoutCancel(ctx), "thaw")
	z.report.Failed = errors.Join(z.report.Failed, failed)
	for _, fs := range z.all {
		_ = fs.Close() // nothing was written through it
	}
	<-z.freezer.one
}
