package restore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// undoTimeout bounds the return of the source after a failed restore.
const undoTimeout = 3 * time.Minute

// The phases of a restore, in the journal.
const (
	PhaseSafety      = "safety"
	PhaseDestination = "destination"
	PhaseCommit      = "commit"
	PhaseEndSource   = "end-source"
)

// Detail is what the journal keeps of a restore, to finish or undo it from any
// phase.
type Detail struct {
	// State is the machine's before; it comes back when the restore fails.
	State string `json:"state"`
	// SourceRun is empty for a machine that was stopped.
	SourceRun string `json:"source_run,omitempty"`
	// SafetyID is the id the safety checkpoint has or would have.
	SafetyID string `json:"safety_id,omitempty"`
	// Top is the overlay the source goes on with.
	Top string `json:"top,omitempty"`
	// Layer and Run are the destination's.
	Layer      string `json:"layer,omitempty"`
	Run        string `json:"run"`
	Generation uint64 `json:"generation"`
}

// DiskRequest asks for Restore disk.
type DiskRequest struct {
	Operation string
	Machine   catalog.Machine
	Target    checkpoint.Checkpoint
	// Source is nil for a machine that is stopped.
	Source Source
	// Paused: the user has paused the source.
	Paused bool
	// WasClean is, of a stopped machine, whether its guest had shut down cleanly.
	WasClean    bool
	Destination Destination
	// NoSafety: what is discarded is not kept.
	NoSafety bool
	// Routes the machine has now, for the safety checkpoint.
	Routes []checkpoint.Route
	// PutBack: the machine's routes become those of the target.
	PutBack bool
	Enter   func(ctx context.Context, phase, text string, detail any) error
	Note    func(format string, args ...any)
}

// DiskResult is what a restore did.
type DiskResult struct {
	// Safety is nil without one.
	Safety     *checkpoint.Checkpoint
	Generation uint64
	Downtime   time.Duration
}

// Config is what a Restorer works with.
type Config struct {
	Catalog  *catalog.Catalog
	Capturer *capture.Capturer
}

// Restorer puts machines back.
type Restorer struct{ cfg Config }

// New returns a Restorer.
func New(cfg Config) *Restorer { return &Restorer{cfg: cfg} }

// attempt is one restore under way.
type attempt struct {
	*Restorer
	DiskRequest
	detail Detail
	// sourceEnded: the source's guest was shut down, or killed.
	sourceEnded bool
	// switched: the source writes to the prepared top.
	switched bool
	began    time.Time
}

// Disk puts the machine's disk back to the target checkpoint and boots it.
// Until the new run has answered and is committed everything can be undone:
// on any error before that the source goes on, with its own disk.
func (r *Restorer) Disk(ctx context.Context, req DiskRequest) (DiskResult, error) {
	a := &attempt{Restorer: r, DiskRequest: req, began: time.Now(), detail: Detail{
		State: string(req.Machine.State), SourceRun: req.Machine.RunID, Run: durable.NewID(),
		Generation: req.Machine.Generation + 1,
	}}
	if req.Source == nil {
		a.detail.SourceRun = ""
	}
	result, err := a.upToCommit(ctx)
	if err != nil {
		return DiskResult{}, a.giveBack(ctx, err)
	}
	// Committed: from here on only forward, whatever was canceled.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	result.Generation = a.detail.Generation
	req.Machine.Generation = result.Generation
	if err := a.Destination.Replace(ctx, req.Machine, a.detail.Run); err != nil {
		return result, err
	}
	result.Downtime = time.Since(a.began)
	if err := a.Enter(ctx, PhaseEndSource, "ending the old run", a.detail); err != nil {
		return result, err
	}
	if a.Source != nil && !a.sourceEnded {
		if err := a.Source.Kill(ctx); err != nil {
			return result, fmt.Errorf("restore of %s is done, but its old run did not end: %w", req.Machine.Name, err)
		}
	}
	return result, nil
}

// upToCommit is all that can be undone.
func (a *attempt) upToCommit(ctx context.Context) (DiskResult, error) {
	safety, err := a.safety(ctx)
	if err != nil {
		return DiskResult{}, err
	}
	chain, err := a.destinationChain(ctx)
	if err != nil {
		return DiskResult{}, err
	}
	target := a.Machine
	if err := json.Unmarshal(a.Target.Spec, &target.Spec); err != nil {
		return DiskResult{}, errdefs.New(errdefs.Storage, "read spec of checkpoint %s: %w", a.Target.ID, err)
	}
	target.ImageBuildID, target.Generation = a.Target.ImageBuildID, a.detail.Generation
	if _, err := a.Destination.Begin(ctx, target, Launch{RunID: a.detail.Run, Chain: chain}); err != nil {
		return DiskResult{}, fmt.Errorf("boot from checkpoint %s: %w", a.Target.ID, err)
	}
	if err := a.commit(ctx, target, chain); err != nil {
		if endErr := a.Destination.End(context.WithoutCancel(ctx), a.Machine.ID, a.detail.Run); endErr != nil {
			err = errors.Join(err, endErr)
		}
		return DiskResult{}, err
	}
	return DiskResult{Safety: safety}, nil
}

// destinationChain is the target's layers with a fresh overlay on top, staged
// under the operation's lease.
func (a *attempt) destinationChain(ctx context.Context) ([]catalog.Layer, error) {
	chain, err := a.cfg.Catalog.GetLayers(ctx, a.Target.Layers...)
	if err != nil {
		return nil, err
	}
	top, err := a.cfg.Capturer.NewLayer(ctx, a.Machine.ID, a.Machine.Spec.DiskBytes)
	if err != nil {
		return nil, err
	}
	a.detail.Layer = top.ID
	if err := a.cfg.Catalog.AddLayer(ctx, a.Operation, top); err != nil {
		a.cfg.Capturer.RemoveFile(a.cfg.Capturer.Path(top))
		return nil, err
	}
	if err := a.Enter(ctx, PhaseDestination, "booting from the checkpoint", a.detail); err != nil {
		return nil, err
	}
	return append(chain, top), nil
}

// commit makes the destination the machine, in one transaction.
func (a *attempt) commit(ctx context.Context, target catalog.Machine, chain []catalog.Layer) error {
	if err := a.Enter(ctx, PhaseCommit, "committing", a.detail); err != nil {
		return err
	}
	generation, err := a.cfg.Catalog.ReplaceChain(ctx, catalog.ReplaceChain{
		MachineID: a.Machine.ID, OperationID: a.Operation, CheckpointID: a.Target.ID,
		Top: chain[len(chain)-1], RunID: a.detail.Run, RestoreRoutes: a.PutBack,
	})
	if err != nil {
		return err
	}
	a.detail.Generation = generation
	return nil
}

// giveBack lets the source go on after a restore that failed.
func (a *attempt) giveBack(ctx context.Context, failure error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	// A prepared top stays once the disk below it may have been sealed: the
	// source then goes on with it.
	if a.detail.Top != "" && a.Source != nil && !a.sourceEnded && !a.switched {
		if err := a.cfg.Capturer.Discard(ctx, a.Machine.ID, a.detail.Top); err != nil {
			failure = errors.Join(failure, err)
		}
	}
	var err error
	switch {
	case a.Source == nil:
	case a.sourceEnded:
		err = a.Source.Boot(ctx)
	case !a.Paused:
		err = a.Source.Resume(ctx)
	}
	if err != nil {
		return errdefs.New(errdefs.KindOf(failure), "%w; and machine %s did not go on: %w; run holdpoint start %s",
			failure, a.Machine.Name, err, a.Machine.Name)
	}
	return failure
}
