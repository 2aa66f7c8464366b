package restore

import (
	"context"
	"errors"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// SuspendedExit is the exit of a suspended machine whose disk's top was not
// touched since its head. After a resume that failed it has another one.
const SuspendedExit = "suspended"

// Killer ends runs.
type Killer interface {
	// Kill ends the run as a power cut would and returns when its exit is
	// proven. Killing an ended run changes nothing.
	Kill(ctx context.Context) error
}

// SuspendRequest asks for a suspension.
type SuspendRequest struct {
	// Checkpoint is the full checkpoint that becomes the machine's head.
	Checkpoint capture.FullRequest
	Run        Killer
	// Paused: the user has paused the run.
	Paused bool
}

// Suspend takes a full checkpoint of a machine, ends its run, and records it
// as suspended. Before the checkpoint is published any error lets the machine
// go on; after that it is seen through. When the end of the run cannot be
// proven the result is complete and the machine goes on, or, with
// OUTCOME_UNKNOWN, nobody knows.
func (r *Restorer) Suspend(ctx context.Context, req SuspendRequest) (capture.FullResult, error) {
	k := req.Checkpoint
	k.StayPaused = !req.Paused
	result, err := r.cfg.Capturer.Full(ctx, k)
	if err != nil {
		return result, fmt.Errorf("suspend: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err = r.end(ctx, k.Machine, result.Detail, req.Run)
	if err == nil || !k.StayPaused {
		return result, err
	}
	if goOn := r.cfg.Capturer.Decide(ctx, k.Source, result.Detail, true); goOn != nil {
		return result, errdefs.New(errdefs.OutcomeUnknown,
			"suspend machine %s: checkpoint %s is kept, but nobody knows whether its run goes on (%w; %w); end it with holdpoint stop --force %s",
			k.Machine.Name, result.Checkpoint.ID, err, goOn, k.Machine.Name)
	}
	return result, err
}

// end proves the end of a run whose checkpoint is published, and records it.
func (r *Restorer) end(ctx context.Context, m catalog.Machine, d capture.FullDetail, run Killer) error {
	if run != nil {
		if err := run.Kill(ctx); err != nil && !errdefs.Is(err, errdefs.WrongState) {
			return fmt.Errorf("suspend machine %s: end its run: %w", m.Name, err)
		}
	}
	return r.cfg.Catalog.EndRun(ctx, m.ID, d.RunID, machine.Suspended, SuspendedExit)
}

// SettleSuspend finishes a suspension whose checkpoint is published, and undoes
// any other: the machine goes on. source and run are its run, nil if that has
// ended.
func (r *Restorer) SettleSuspend(ctx context.Context, m catalog.Machine, d capture.FullDetail, source capture.FullSource, run Killer) (suspended bool, err error) {
	if m.State == machine.Suspended {
		return m.Head == d.CheckpointID, nil
	}
	_, err = r.cfg.Catalog.GetCheckpoint(ctx, d.CheckpointID)
	if errdefs.Is(err, errdefs.NotFound) {
		_, err = r.cfg.Capturer.SettleFull(ctx, m, d, source, true)
		return false, err
	}
	if err != nil {
		return false, err
	}
	if m.RunID != d.RunID || m.Head != d.CheckpointID {
		return false, nil // it has gone on since
	}
	return true, r.end(ctx, m, d, run)
}

// ResumeDetail is what the journal keeps of a resume.
type ResumeDetail struct {
	// Run is the one that is begun.
	Run string `json:"run"`
}

// ResumeRequest asks a suspended machine to go on from its head.
type ResumeRequest struct {
	Operation   string
	Machine     catalog.Machine
	Destination Destination
	Host        Host
	AsIs        bool
	// Enter is told PhaseDestination with a ResumeDetail.
	Enter func(ctx context.Context, phase, text string, detail any) error
	Note  func(format string, args ...any)
}

// Resume lets a suspended machine go on from its head. On error it is still
// suspended, and what a run of it may have written is gone.
func (r *Restorer) Resume(ctx context.Context, req ResumeRequest) (Begun, error) {
	m := req.Machine
	if m.State != machine.Suspended {
		return Begun{}, errdefs.New(errdefs.WrongState, "resume machine %s: it is %s, not suspended", m.Name, m.State)
	}
	head, err := r.cfg.Catalog.GetCheckpoint(ctx, m.Head)
	if err != nil {
		return Begun{}, err
	}
	w := want{
		operation: req.Operation, machine: m, target: head, host: req.Host, destination: req.Destination, asIs: req.AsIs,
		noStandby: true, restoreDisk: fmt.Sprintf("holdpoint restore %s %s --disk", m.Name, head.ID),
	}
	s := &start{launch: Launch{RunID: durable.NewID(), AsIs: req.AsIs}, release: func() {}}
	defer func() { s.release() }()
	if err := r.checkFull(ctx, w); err != nil {
		return Begun{}, fmt.Errorf("resume machine %s: %w", m.Name, err)
	}
	if err := r.openMemory(ctx, w, s); err != nil {
		return Begun{}, fmt.Errorf("resume machine %s: %w", m.Name, err)
	}
	if err := req.Enter(ctx, PhaseDestination, "continuing the machine", ResumeDetail{Run: s.launch.RunID}); err != nil {
		return Begun{}, err
	}
	if err := r.cleanTop(ctx, w, &m); err != nil {
		return Begun{}, err
	}
	if s.launch.Chain, err = r.cfg.Catalog.Chain(ctx, m.ID); err != nil {
		return Begun{}, err
	}
	if err := r.cfg.Capturer.CheckLayers(s.launch.Chain, "machine "+m.Name); err != nil {
		return Begun{}, err
	}
	if err := r.cfg.Catalog.BeginIncoming(ctx, m.ID, s.launch.RunID); err != nil {
		return Begun{}, err
	}
	begun, _, err := r.beginRun(ctx, w, m, s)
	if err == nil {
		err = req.Destination.Replace(ctx, m, s.launch.RunID)
		if err == nil && begun.Note != "" {
			req.Note("%s", begun.Note)
		}
		return begun, err
	}
	return Begun{}, errors.Join(fmt.Errorf("resume machine %s: %w; it is suspended still", m.Name, err), r.suspendedStill(ctx, m, s.launch.RunID, err))
}

// cleanTop gives a machine whose last resume failed a new top: that run may
// have written to the old one, which its memory knows nothing of.
func (r *Restorer) cleanTop(ctx context.Context, w want, m *catalog.Machine) error {
	if m.Exit == SuspendedExit {
		return nil
	}
	top, err := r.top(ctx, w, &start{})
	if err != nil {
		return err
	}
	m.Generation, err = r.cfg.Catalog.ReplaceChain(ctx, catalog.ReplaceChain{
		MachineID: m.ID, OperationID: w.operation, CheckpointID: w.target.ID, Top: top, Full: true,
	})
	return err
}

// suspendedStill records that a resume failed.
func (r *Restorer) suspendedStill(ctx context.Context, m catalog.Machine, runID string, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return r.cfg.Catalog.EndRun(ctx, m.ID, runID, machine.Suspended, "did not resume: "+cause.Error())
}

// SettleResume ends a resume whose daemon died before the machine was running:
// run is ended, and the machine suspended still. A machine that runs is left
// alone.
func (r *Restorer) SettleResume(ctx context.Context, m catalog.Machine, d ResumeDetail, dest Destination) (running bool, err error) {
	if m.RunID == d.Run && m.State != machine.Suspended && m.State != machine.Stopped {
		return true, nil
	}
	if err := dest.End(ctx, m.ID, d.Run); err != nil {
		return false, err
	}
	if m.RunID != d.Run {
		return false, nil // it was not recorded, so it never began
	}
	return false, r.suspendedStill(ctx, m, d.Run, errdefs.New(errdefs.Interrupted, "the daemon ended meanwhile"))
}
