//go:build linux

// Package shorten keeps the disks of running machines short: after checkpoints
// it has their layers merged in the background, so that the next window is no
// longer than the first. It decides only when; a machine whose disk stays long
// works as well.
package shorten

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Catalog is what a Shortener asks the catalog.
type Catalog interface {
	ListMachines(ctx context.Context) ([]catalog.Machine, error)
}

// Keeper shortens one disk (package keeper).
type Keeper interface {
	Shorten(ctx context.Context, m catalog.Machine) (shorter bool, err error)
}

// Config is what a Shortener works with.
type Config struct {
	Catalog Catalog
	Keeper  Keeper
	Log     *slog.Logger
}

// Shortener shortens one disk after the other. Its life: New; Look whenever
// disks may have become longer; Close.
type Shortener struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	look   chan struct{}
	// failed says of runs whose disk could not be shortened when that was.
	failed map[string]time.Time
}

// again is after what time a disk that could not be shortened is tried again: a
// host without space, or without memory, is not helped by trying at once.
const again = 10 * time.Minute

// New returns a Shortener.
func New(cfg Config) *Shortener {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Shortener{cfg: cfg, ctx: ctx, cancel: cancel, look: make(chan struct{}, 1), failed: map[string]time.Time{}}
	s.wg.Go(s.work)
	return s
}

// Look tells that disks may have become longer.
func (s *Shortener) Look() {
	select {
	case s.look <- struct{}{}:
	default: // it will look anyway
	}
}

// Stop ends what is under way; Close waits for it.
func (s *Shortener) Stop() { s.cancel() }

// Close ends what is under way and waits for that.
func (s *Shortener) Close() {
	s.cancel()
	s.wg.Wait()
}

func (s *Shortener) work() {
	for {
		select {
		case <-s.look:
			s.all()
		case <-s.ctx.Done():
			return
		}
	}
}

// all shortens the disks of all machines that are worth it.
func (s *Shortener) all() {
	machines, err := s.cfg.Catalog.ListMachines(s.ctx)
	if err != nil && s.ctx.Err() == nil {
		s.cfg.Log.Warn("look for long disks", "error", err)
	}
	maps.DeleteFunc(s.failed, func(_ string, at time.Time) bool { return time.Since(at) > again })
	for _, m := range machines {
		if _, failed := s.failed[m.RunID]; failed || m.RunID == "" {
			continue
		}
		shorter, err := s.cfg.Keeper.Shorten(s.ctx, m)
		switch {
		case s.ctx.Err() != nil:
			return
		case shorter:
			s.cfg.Log.Info("shortened the disk of a running machine", "machine", m.Name)
		case errors.Is(err, context.Canceled):
			// Somebody else had to merge something; it is tried again.
		case errdefs.Is(err, errdefs.WrongState) || errdefs.Is(err, errdefs.NotFound):
			// Its run has ended meanwhile, or it is gone.
		case err != nil:
			s.failed[m.RunID] = time.Now()
			s.cfg.Log.Warn("shorten a disk; it stays as it is for now", "machine", m.Name, "error", err)
		}
	}
}
