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
	// SafetyID is the id the safety checkpoint has or would have; Safety is
	// how far it came if it is a full one: the source waits for its settling.
	SafetyID string              `json:"safety_id,omitempty"`
	Safety   *capture.FullDetail `json:"safety,omitempty"`
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
	// Source is nil for a machine that is stopped or suspended.
	Source Source
	// Capture, not nil, is the same run, for a full checkpoint of what is
	// discarded; where none can be taken, its disk alone is kept.
	Capture capture.FullSource
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
	// Progress is told how far the copy of a raw disk is, in bytes of data.
	Progress func(done, total int64)
}

// DiskResult is what a restore did.
type DiskResult struct {
	// Safety is nil without one. Of a suspended machine it is its head.
	Safety     *checkpoint.Checkpoint
	Generation uint64
	// Downtime is from the source's last instruction to the answer of the new run.
	Downtime time.Duration
}

// FullRequest asks for Restore machine.
type FullRequest struct {
	DiskRequest
	Host Host
	// AsIs does without proof that the guest has its entropy and time.
	AsIs bool
}

// FullResult is what Restore machine did.
type FullResult struct {
	DiskResult
	// From is FromStandby, FromMemoryFile or FromLayers.
	From string
	// Running and Answer are from the request until the vCPUs ran and until
	// the guest had answered, without the time that the safety checkpoint took.
	Running, Answer time.Duration
	// ClosedSockets to the outside are those the guest had to give up.
	ClosedSockets int
}

// Config is what a Restorer works with.
type Config struct {
	Catalog  *catalog.Catalog
	Capturer *capture.Capturer
	// Memory is for full checkpoints.
	Memory MemoryFiles
}

// Restorer puts machines back, and makes new ones of checkpoints.
type Restorer struct{ cfg Config }

// New returns a Restorer.
func New(cfg Config) *Restorer { return &Restorer{cfg: cfg} }

// attempt is one restore under way.
type attempt struct {
	*Restorer
	FullRequest
	// disk: Restore disk is asked for.
	disk   bool
	detail Detail
	// want and start are what the new run begins from.
	want  want
	start *start
	// sourceEnded: the source's guest was shut down, or killed.
	sourceEnded bool
	// switched: the source writes to the prepared top.
	switched bool
	// kept, not nil, is the full safety checkpoint whose run waits, paused.
	kept *capture.FullDetail
	// began is the request, down the source's last instruction, as far as we
	// know, and safetyTook what is not counted.
	began, down time.Time
	safetyTook  time.Duration
}

// Disk puts the machine's disk back to the target checkpoint and boots it.
// Until the new run has answered and is committed everything can be undone:
// on any error before that the source goes on, with its own disk.
func (r *Restorer) Disk(ctx context.Context, req DiskRequest) (DiskResult, error) {
	result, err := r.restore(ctx, &attempt{FullRequest: FullRequest{DiskRequest: req}, disk: true})
	return result.DiskResult, err
}

// Full puts the whole machine back to the target checkpoint: its memory and its
// disk. It can be undone as Disk can.
func (r *Restorer) Full(ctx context.Context, req FullRequest) (FullResult, error) {
	return r.restore(ctx, &attempt{FullRequest: req})
}

func (r *Restorer) restore(ctx context.Context, a *attempt) (FullResult, error) {
	a.Restorer, a.began = r, time.Now()
	a.detail = Detail{
		State: string(a.Machine.State), SourceRun: a.Machine.RunID, Generation: a.Machine.Generation + 1,
	}
	if a.Source == nil {
		a.detail.SourceRun = ""
	}
	if err := a.prepareStart(ctx); err != nil {
		return FullResult{}, err
	}
	defer func() { a.start.release() }()
	result, err := a.upToCommit(ctx)
	if err != nil {
		return FullResult{}, a.giveBack(ctx, err)
	}
	// Committed: from here on only forward, whatever was canceled.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	result.Generation, result.From = a.detail.Generation, a.start.from
	a.Machine.Generation = result.Generation
	if err := a.Destination.Replace(ctx, a.Machine, a.detail.Run); err != nil {
		return result, err
	}
	result.Downtime = time.Since(a.down)
	if err := a.Enter(ctx, PhaseEndSource, "ending the old run", a.detail); err != nil {
		return result, err
	}
	if a.Source != nil && !a.sourceEnded {
		if err := a.Source.Kill(ctx); err != nil {
			return result, fmt.Errorf("restore of %s is done, but its old run did not end: %w", a.Machine.Name, err)
		}
	}
	return result, nil
}

// prepareStart makes ready what the new run begins from, while the source runs.
func (a *attempt) prepareStart(ctx context.Context) error {
	if a.Target.MachineID != a.Machine.ID {
		return errdefs.New(errdefs.Invalid, "restore machine %s: checkpoint %s is another machine's; make a new machine of it with: holdpoint fork %s",
			a.Machine.Name, label(a.Target), a.Target.ID)
	}
	target := a.Machine
	if err := json.Unmarshal(a.Target.Spec, &target.Spec); err != nil {
		return errdefs.New(errdefs.Storage, "read spec of checkpoint %s: %w", a.Target.ID, err)
	}
	target.ImageBuildID, target.Generation = a.Target.ImageBuildID, a.detail.Generation
	a.want = want{
		operation: a.Operation, machine: target, target: a.Target, host: a.Host, destination: a.Destination,
		boot: a.disk, asIs: a.AsIs,
		restoreDisk: fmt.Sprintf("holdpoint restore %s %s --disk", a.Machine.Name, a.Target.ID), progress: a.Progress,
	}
	return a.renewStart(ctx)
}

func (a *attempt) renewStart(ctx context.Context) (err error) {
	start, err := a.prepare(ctx, a.want)
	if err != nil {
		return err
	}
	a.start = start
	a.detail.Run, a.detail.Layer = start.launch.RunID, start.launch.Chain[len(start.launch.Chain)-1].ID
	return nil
}

// upToCommit is all that can be undone.
func (a *attempt) upToCommit(ctx context.Context) (result FullResult, err error) {
	safetyBegan := time.Now()
	a.down = safetyBegan
	if result.Safety, err = a.safety(ctx); err != nil {
		return result, errors.Join(err, a.start.giveUp(ctx, a.want))
	}
	a.safetyTook = time.Since(safetyBegan)
	begun, err := a.begin(ctx)
	if err != nil {
		return result, err
	}
	result.Running, result.Answer, result.ClosedSockets = begun.Running, begun.Answer, begun.ClosedSockets
	if err := a.commit(ctx); err != nil {
		if endErr := a.Destination.End(context.WithoutCancel(ctx), a.Machine.ID, a.detail.Run); endErr != nil {
			err = errors.Join(err, endErr)
		}
		return result, err
	}
	return result, nil
}

// begin begins the new run beside the source. A standby that does not go on is
// given up for a run from the memory file.
func (a *attempt) begin(ctx context.Context) (Begun, error) {
	for {
		if err := a.Enter(ctx, PhaseDestination, "beginning a run from the checkpoint", a.detail); err != nil {
			return Begun{}, errors.Join(err, a.start.giveUp(ctx, a.want))
		}
		before := time.Since(a.began) - a.safetyTook
		begun, mended, err := a.beginRun(ctx, a.want, a.want.machine, a.start)
		if err == nil {
			begun.Running, begun.Answer = begun.Running+before, begun.Answer+before
			if begun.Note != "" {
				a.Note("%s", begun.Note)
			}
			return begun, nil
		}
		a.start.release()
		switch {
		case mended && ctx.Err() == nil:
			a.Note("the memory file of checkpoint %s was damaged; a run from its layers takes the place of one that did not go on", label(a.Target))
		case a.start.launch.Standby && ctx.Err() == nil:
			a.Note("a standby did not go on (%v); a run from the memory file takes its place", err)
			a.want.noStandby = true
		default:
			return Begun{}, fmt.Errorf("begin from checkpoint %s: %w", label(a.Target), err)
		}
		if err := a.renewStart(ctx); err != nil {
			return Begun{}, err
		}
	}
}

// commit makes the destination the machine, in one transaction.
func (a *attempt) commit(ctx context.Context) error {
	if err := a.Enter(ctx, PhaseCommit, "committing", a.detail); err != nil {
		return err
	}
	chain := a.start.launch.Chain
	generation, err := a.cfg.Catalog.ReplaceChain(ctx, catalog.ReplaceChain{
		MachineID: a.Machine.ID, OperationID: a.Operation, CheckpointID: a.Target.ID,
		Top: chain[len(chain)-1], RunID: a.detail.Run, Full: !a.disk, RestoreRoutes: a.PutBack,
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
	case a.kept != nil:
		err = a.cfg.Capturer.Decide(ctx, a.Capture, *a.kept, true)
	case !a.Paused:
		err = a.Source.Resume(ctx)
	}
	if err != nil {
		return errdefs.New(errdefs.KindOf(failure), "%w; and machine %s did not go on: %w; run holdpoint start %s",
			failure, a.Machine.Name, err, a.Machine.Name)
	}
	return failure
}
