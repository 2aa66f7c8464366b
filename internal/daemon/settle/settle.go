//go:build linux

// Package settle brings a home to a known state after whatever ended its
// daemon: runs are adopted, unfinished operations are finished or undone by
// their phase, and files that no record tells of are removed. It starts nothing
// new.
package settle

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/standby"
	"github.com/holdpoint/holdpoint/internal/daemon/view"
	"github.com/holdpoint/holdpoint/internal/diskchain"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// deadline is how long one unfinished operation may take to be settled, and
// patience how long a guest that was asked to stop may take for that.
const (
	deadline = 15 * time.Minute
	patience = 60 * time.Second
)

// Config is what a Settler works with.
type Config struct {
	Home     *home.Home
	Files    *durable.FS
	Catalog  *catalog.Catalog
	Engine   *operation.Engine
	Keeper   *keeper.Keeper
	Capturer *capture.Capturer
	Chains   *diskchain.Chains
	Restorer *restore.Restorer
	Pools    *standby.Pools
	Gates    *hold.Gates
	View     *view.Viewer
	// Images says where image builds leave their bytes.
	Images image.BuildConfig
	Log    *slog.Logger
}

// Settler settles a home, once, before its daemon serves.
type Settler struct {
	cfg Config
	// undecided are, by operation, the functions that give the decision back
	// what the end of a run means.
	undecided map[string]func()
}

// New returns a Settler.
func New(cfg Config) *Settler { return &Settler{cfg: cfg, undecided: map[string]func(){}} }

// Settle does it all. Boots that it needs go on after it returned.
func (s *Settler) Settle(ctx context.Context) error {
	machines, err := s.cfg.Catalog.ListMachines(ctx)
	if err != nil {
		return err
	}
	unfinished, err := s.cfg.Catalog.Unfinished(ctx)
	if err != nil {
		return err
	}
	for _, op := range unfinished {
		// That its run has ended may be what it was for.
		if op.MachineID != "" && (op.Verb == "suspend" || op.Verb == "resume") {
			s.undecided[op.ID] = s.cfg.Keeper.DecideEnd(op.MachineID)
		}
	}
	var wg sync.WaitGroup
	for _, m := range machines {
		wg.Go(func() {
			if err := s.cfg.Keeper.Adopt(ctx, m); err != nil {
				s.cfg.Log.Error("adopt a machine", "machine", m.Name, "error", err)
			}
		})
	}
	wg.Wait()
	if err := s.cfg.Pools.Adopt(ctx); err != nil {
		s.cfg.Log.Error("adopt standbys", "error", err)
	}
	if err := s.endUnknown(ctx, machines); err != nil {
		s.cfg.Log.Warn("end runs that are nobody's", "error", err)
	}
	if err := s.removeUnknown(ctx); err != nil {
		s.cfg.Log.Warn("remove leftovers", "error", err)
	}
	for _, op := range unfinished {
		s.cfg.Log.Info("settle an unfinished operation", "operation", op.ID, "verb", op.Verb, "phase", op.Phase)
		s.cfg.Engine.Resume(op, deadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
			if decided := s.undecided[op.ID]; decided != nil {
				defer decided()
			}
			return s.settleOne(ctx, w, op)
		})
	}
	return nil
}

// Again finishes or undoes an operation of this daemon whose failure could not be
// recorded, and which has ended since.
func (s *Settler) Again(ctx context.Context, w *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
	return s.settleOne(ctx, w, op)
}

// interrupted is the outcome of an operation that was undone.
func interrupted(op catalog.Operation, undone string) error {
	return errdefs.New(errdefs.Interrupted, "%s: the daemon ended meanwhile; %s; try again", op.Verb, undone)
}

// endUnknown ends what runs and is no machine's and no standby: restores aside,
// and what was about to become something. Runs that unfinished operations have
// begun beside a machine's are that machine's.
func (s *Settler) endUnknown(ctx context.Context, machines []catalog.Machine) error {
	known := map[string]bool{}
	for _, m := range machines {
		known[m.ID], known[m.RunID] = true, true
	}
	standbys, err := s.cfg.Catalog.Standbys(ctx, "")
	if err != nil {
		return err
	}
	for _, standby := range standbys {
		known[standby.RunID] = true
	}
	return s.cfg.Keeper.EndUnknown(func(runID, machineID string) bool {
		return known[runID] || machineID != "" && known[machineID]
	})
}

// removeUnknown removes files that no record tells of: what a crash left
// between making a file and recording it. What ended runs left is removed, too:
// an earlier daemon may have had no time for that.
func (s *Settler) removeUnknown(ctx context.Context) error {
	layers, err := s.cfg.Catalog.ListLayers(ctx)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, layer := range layers {
		known[s.cfg.Capturer.Path(layer)] = true
	}
	entries, err := os.ReadDir(s.cfg.Home.Layers())
	if err != nil {
		return errdefs.New(errdefs.Storage, "list layers: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		path := filepath.Join(s.cfg.Home.Layers(), entry.Name())
		if ours := slices.Contains([]string{".qcow2", ".raw", ".memory", ".devices"}, filepath.Ext(path)); ours && !known[path] {
			errs = append(errs, s.cfg.Files.Remove(path))
		}
	}
	// The probes of QEMU are in the cache's own folder.
	errs = append(errs, s.cfg.Files.RemoveTemps(s.cfg.Home.Cache()), s.cfg.Chains.RemoveUnfinished())
	errs = append(errs, image.Sweep(ctx, s.cfg.Images), s.cfg.Capturer.Sweep(ctx), s.cfg.Keeper.Sweep(ctx))
	return errors.Join(errs...)
}
