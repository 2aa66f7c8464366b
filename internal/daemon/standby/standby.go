//go:build linux

// Package standby keeps runs ready that are loaded with a checkpoint and have
// never run: as many as each checkpoint's pool wants. Who uses them, and how
// one becomes a machine's run, is said elsewhere.
package standby

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	// fillTimeout bounds one filling of all pools.
	fillTimeout = 15 * time.Minute
	// retryAfter is how long a pool that could not be filled is left alone.
	retryAfter = time.Minute
	// endTimeout bounds the end of one standby.
	endTimeout = 30 * time.Second
)

// Config is what Pools work with.
type Config struct {
	Catalog  *catalog.Catalog
	Keeper   *keeper.Keeper
	Capturer *capture.Capturer
	Engine   *operation.Engine
	Log      *slog.Logger
}

// Pools are the pools of all checkpoints. Their life: New; Adopt at the start;
// Set when a person wants another size; Refill whenever one may be short; Close.
type Pools struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// filling is held while a pool is changed.
	filling sync.Mutex

	mu sync.Mutex
	// busy: a filling is under way or about to be.
	busy  bool
	after *time.Timer
}

// New returns Pools that have adopted nothing yet.
func New(cfg Config) *Pools {
	ctx, cancel := context.WithCancel(context.Background())
	return &Pools{cfg: cfg, ctx: ctx, cancel: cancel}
}

// Close lets go of all standbys, which stay ready, and waits for what the
// pools themselves run.
func (p *Pools) Close() {
	p.cancel()
	p.mu.Lock()
	if p.after != nil {
		p.after.Stop()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// Adopt takes hold of the standbys that an earlier daemon left; those that do
// not wait any more are forgotten.
func (p *Pools) Adopt(ctx context.Context) error {
	list, err := p.cfg.Catalog.Standbys(ctx, "")
	if err != nil {
		return err
	}
	for _, s := range list {
		if p.cfg.Keeper.AdoptStandby(ctx, s.RunID) {
			p.follow(s.RunID)
			continue
		}
		if err := p.cfg.Catalog.DropStandby(ctx, s.RunID); err != nil {
			return err
		}
	}
	return nil
}

// follow forgets a standby that ends before anybody has used it.
func (p *Pools) follow(runID string) {
	p.wg.Go(func() {
		if p.cfg.Keeper.AwaitStandby(p.ctx, runID) != nil {
			return // closed
		}
		list, err := p.cfg.Catalog.Standbys(p.ctx, "")
		unused := slices.ContainsFunc(list, func(s catalog.Standby) bool { return s.RunID == runID })
		if err != nil || !unused {
			return
		}
		p.cfg.Log.Warn("a standby ended before it was used", "run", runID)
		if err := p.drop(p.ctx, runID); err != nil {
			p.cfg.Log.Warn("forget a standby that ended", "run", runID, "error", err)
		}
		p.Refill(p.ctx)
	})
}

// drop ends a standby and forgets it. One that was taken meanwhile is left alone.
func (p *Pools) drop(ctx context.Context, runID string) error {
	if err := p.cfg.Catalog.DropStandby(ctx, runID); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	return p.cfg.Keeper.End(ctx, "", runID)
}

// Set makes count standbys of the checkpoint ready, for an operation that holds
// it, and keeps them so. On error the pool is recorded all the same.
func (p *Pools) Set(ctx context.Context, w *operation.Work, k checkpoint.Checkpoint, count int) error {
	p.filling.Lock()
	defer p.filling.Unlock()
	if err := p.cfg.Catalog.SetPool(ctx, k.ID, count); err != nil {
		return err
	}
	return p.fit(ctx, w, k, count)
}

// End ends the pool of a checkpoint that is about to go.
func (p *Pools) End(ctx context.Context, checkpointID string) error {
	p.filling.Lock()
	defer p.filling.Unlock()
	if err := p.cfg.Catalog.SetPool(ctx, checkpointID, 0); err != nil {
		return err
	}
	return p.shrink(ctx, checkpointID, 0)
}

func (p *Pools) shrink(ctx context.Context, checkpointID string, count int) error {
	for {
		// The list may get shorter at any time, as standbys are taken.
		list, err := p.cfg.Catalog.Standbys(ctx, checkpointID)
		if err != nil || len(list) <= count {
			return err
		}
		if err := p.drop(ctx, list[len(list)-1].RunID); err != nil {
			return err
		}
	}
}

// fit brings the pool to its size.
func (p *Pools) fit(ctx context.Context, w *operation.Work, k checkpoint.Checkpoint, count int) error {
	if err := p.shrink(ctx, k.ID, count); err != nil {
		return err
	}
	for {
		list, err := p.cfg.Catalog.Standbys(ctx, k.ID)
		if err != nil || len(list) >= count {
			return err
		}
		w.Say(fmt.Sprintf("loading standby %d of %d", len(list)+1, count))
		if err := p.add(ctx, w.ID(), k); err != nil {
			return fmt.Errorf("load a standby of checkpoint %s: %w", k.ID, err)
		}
	}
}

// add loads one standby.
func (p *Pools) add(ctx context.Context, operationID string, k checkpoint.Checkpoint) error {
	m, l, release, err := p.cfg.Keeper.Load(ctx, k)
	if err != nil {
		return err
	}
	defer release()
	top, err := p.cfg.Capturer.NewLayer(ctx, "", m.Spec.DiskBytes)
	if err != nil {
		return err
	}
	if err := p.cfg.Catalog.AddLayer(ctx, operationID, top); err != nil {
		p.cfg.Capturer.RemoveFile(p.cfg.Capturer.Path(top))
		return err
	}
	l.Chain = append(l.Chain, top)
	if err := p.cfg.Keeper.BeginStandby(ctx, m, l); err != nil {
		return err
	}
	err = p.cfg.Catalog.AddStandby(ctx, catalog.Standby{RunID: l.RunID, CheckpointID: k.ID, LayerID: top.ID})
	if err != nil {
		return errors.Join(err, p.drop(ctx, l.RunID))
	}
	p.follow(l.RunID)
	return nil
}

// Refill fills the pools that are short, in the background.
func (p *Pools) Refill(ctx context.Context) {
	short, err := p.short(ctx)
	if err != nil || len(short) == 0 {
		if err != nil && p.ctx.Err() == nil {
			p.cfg.Log.Warn("look for short pools", "error", err)
		}
		return
	}
	p.mu.Lock()
	if p.busy || p.ctx.Err() != nil {
		p.mu.Unlock()
		return
	}
	p.busy = true
	p.mu.Unlock()
	// Its end comes back here for the next one.
	if err := p.begin(ctx, short[0]); err != nil {
		p.cfg.Log.Warn("fill a pool", "checkpoint", short[0], "error", err)
		p.rest()
	}
}

// rest leaves the pools alone for a while.
func (p *Pools) rest() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return
	}
	p.after = time.AfterFunc(retryAfter, func() {
		p.mu.Lock()
		p.busy = false
		p.mu.Unlock()
		p.Refill(p.ctx)
	})
}

func (p *Pools) begin(ctx context.Context, checkpointID string) error {
	request := operation.Request{
		Verb: "checkpoint pool", Options: &holdpointv1.SetPoolRequest{Checkpoint: checkpointID}, Timeout: fillTimeout,
	}
	_, err := p.cfg.Engine.Begin(ctx, request, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		if err := p.fill(ctx, w, checkpointID); err != nil {
			p.rest()
			return nil, err
		}
		p.mu.Lock()
		p.busy = false
		p.mu.Unlock()
		return nil, nil
	})
	return err
}

func (p *Pools) fill(ctx context.Context, w *operation.Work, checkpointID string) error {
	p.filling.Lock()
	defer p.filling.Unlock()
	claim := catalog.Claim{Kind: catalog.CheckpointResource, ID: checkpointID}
	if err := p.cfg.Catalog.Acquire(ctx, w.ID(), fillTimeout, claim); err != nil {
		return err
	}
	k, err := p.cfg.Catalog.GetCheckpoint(ctx, checkpointID)
	if err != nil {
		return err
	}
	pools, err := p.cfg.Catalog.Pools(ctx)
	if err != nil {
		return err
	}
	err = p.fit(ctx, w, k, pools[checkpointID])
	// What the pool needs, its standbys keep; a removal need not wait.
	if released := p.cfg.Catalog.Release(context.WithoutCancel(ctx), w.ID(), claim); err == nil {
		err = released
	}
	return err
}

// short gives the checkpoints whose pools want more standbys than there are.
func (p *Pools) short(ctx context.Context) ([]string, error) {
	pools, err := p.cfg.Catalog.Pools(ctx)
	if err != nil || len(pools) == 0 {
		return nil, err
	}
	list, err := p.cfg.Catalog.Standbys(ctx, "")
	if err != nil {
		return nil, err
	}
	for _, s := range list {
		pools[s.CheckpointID]--
	}
	maps.DeleteFunc(pools, func(_ string, missing int) bool { return missing <= 0 })
	return slices.Sorted(maps.Keys(pools)), nil
}

// Check refuses what no pool can be kept of; ref is what the user called it.
func Check(ref string, k checkpoint.Checkpoint, count int) error {
	if k.Full == nil {
		return errdefs.New(errdefs.KindMismatch, "checkpoint pool: %s is a disk checkpoint, which is booted; choose a full one", ref)
	}
	if count > MaxCount {
		return errdefs.New(errdefs.Invalid, "checkpoint pool: %d standbys: at most %d", count, MaxCount)
	}
	return nil
}

// MaxCount is the largest pool of one checkpoint.
const MaxCount = 64
