package restore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Child is what the journal keeps of each machine that a fork makes, before
// the first of them is made.
type Child struct {
	MachineID string `json:"machine_id"`
	Name      string `json:"name"`
}

// ForkDetail is what the journal keeps of a fork.
type ForkDetail struct {
	Checkpoint string  `json:"checkpoint"`
	Children   []Child `json:"children"`
}

// ForkRequest asks for one new machine from a checkpoint that the operation has
// leased and whose child is in the journal.
type ForkRequest struct {
	Operation string
	Target    checkpoint.Checkpoint
	// Machine has the child's id, name, link magic, generation and
	// RemoveOnStop, and of an image's boot also its spec; the rest is the
	// checkpoint's.
	Machine     catalog.Machine
	Destination Destination
	Host        Host
	// Boot boots the disk of a full checkpoint.
	Boot bool
	AsIs bool
	Note func(format string, args ...any)
	// Progress is told how far the copy of a raw disk is, in bytes of data.
	Progress func(done, total int64)
}

// ForkResult is a new machine that runs.
type ForkResult struct {
	Machine catalog.Machine
	// From is FromDisk of a boot, or as of FullResult.
	From string
	// Running and Answer are from the request on.
	Running, Answer time.Duration
	ClosedSockets   int
}

// Fork makes one new machine of a checkpoint and returns when it answers: of a
// full one it continues, of a disk one it boots. On error nothing of it is left
// but layers that go with the operation.
func (r *Restorer) Fork(ctx context.Context, req ForkRequest) (ForkResult, error) {
	began := time.Now()
	w, err := req.want()
	if err != nil {
		return ForkResult{}, err
	}
	for {
		s, err := r.prepare(ctx, w)
		if err != nil {
			return ForkResult{}, err
		}
		before := time.Since(began)
		begun, err := r.bear(ctx, w, s)
		s.release()
		if err == nil {
			if begun.Note != "" {
				req.Note("%s", begun.Note)
			}
			m, err := r.cfg.Catalog.GetMachine(ctx, w.machine.ID)
			return ForkResult{
				Machine: m, From: s.from, Running: before + begun.Running, Answer: before + begun.Answer, ClosedSockets: begun.ClosedSockets,
			}, err
		}
		if !s.launch.Standby || ctx.Err() != nil || errdefs.Is(err, errdefs.AlreadyExists) {
			return ForkResult{}, err
		}
		req.Note("a standby did not go on (%v); a run from the memory file takes its place", err)
		w.noStandby = true
	}
}

func (req ForkRequest) want() (want, error) {
	k, m := req.Target, req.Machine
	if k.MachineID != "" {
		if err := json.Unmarshal(k.Spec, &m.Spec); err != nil {
			return want{}, errdefs.New(errdefs.Storage, "read spec of checkpoint %s: %w", k.ID, err)
		}
	}
	m.ImageBuildID = k.ImageBuildID
	boot := k.Full == nil || req.Boot
	if !boot {
		m.LinkMagic = k.Full.LinkMagic // it is in the memory
	}
	return want{
		operation: req.Operation, machine: m, target: k, host: req.Host, destination: req.Destination, boot: boot, asIs: req.AsIs,
		restoreDisk: fmt.Sprintf("holdpoint restore MACHINE %s --disk", k.ID), progress: req.Progress,
	}, nil
}

// bear records the child, begins its run and makes it running.
func (r *Restorer) bear(ctx context.Context, w want, s *start) (Begun, error) {
	m, chain := w.machine, s.launch.Chain
	if err := r.cfg.Catalog.CreateFork(ctx, m, w.target.ID, chain[len(chain)-1]); err != nil {
		return Begun{}, errors.Join(err, s.giveUp(ctx, w))
	}
	record := r.cfg.Catalog.BeginIncoming
	if w.boot {
		record = r.cfg.Catalog.BeginRun
	}
	err := record(ctx, m.ID, s.launch.RunID)
	if err != nil {
		return Begun{}, errors.Join(err, s.giveUp(ctx, w), r.unmake(ctx, w))
	}
	begun, _, err := r.beginRun(ctx, w, m, s)
	if err != nil {
		err = fmt.Errorf("begin machine %s from checkpoint %s: %w", m.Name, label(w.target), err)
		return Begun{}, errors.Join(err, r.unmake(ctx, w))
	}
	if err := w.destination.Replace(ctx, m, s.launch.RunID); err != nil {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return Begun{}, errors.Join(err, w.destination.End(end, m.ID, s.launch.RunID), r.unmake(ctx, w))
	}
	return begun, nil
}

// unmake forgets a child without a run.
func (r *Restorer) unmake(ctx context.Context, w want) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return r.cfg.Catalog.RemoveMachine(ctx, w.machine.ID, w.operation)
}
