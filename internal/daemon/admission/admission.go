//go:build linux

// Package admission is the one way in for requests that change something: it
// admits them as operations, resolves what they name, and leases it to them.
// What an operation then does is its verb's.
package admission

import (
	"context"
	"log/slog"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/proof"
	"github.com/holdpoint/holdpoint/internal/daemon/reserve"
	"github.com/holdpoint/holdpoint/internal/daemon/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/shellwords"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// The deadlines of operations. Each is far beyond what the verb takes on a
// slow host; an operation that runs into it is undone.
const (
	QuickDeadline = time.Minute
	BootDeadline  = 5 * time.Minute
	StoryDeadline = 15 * time.Minute
	BuildDeadline = time.Hour
)

// LeaseTime is how long an operation's claims live at the longest.
const LeaseTime = 2 * time.Hour

// UndoTimeout bounds what is undone after a failure.
const UndoTimeout = time.Minute

// factsTimeout bounds the question what runs in the guest.
const factsTimeout = 5 * time.Second

// Desk is what all verbs work with. It has no state of its own.
type Desk struct {
	Catalog  *catalog.Catalog
	Engine   *operation.Engine
	Gates    *hold.Gates
	Keeper   *keeper.Keeper
	Capturer *capture.Capturer
	Reserve  *reserve.Reserve
	View     *view.Viewer
	Prover   *proof.Prover
	Log      *slog.Logger
}

// StandAside makes the daemon's own work on a machine's checkpoints give way.
func (d *Desk) StandAside(machineID string) { d.Prover.StandAside(machineID) }

// Begin admits an operation and answers with it.
func (d *Desk) Begin(ctx context.Context, requestID, verb string, options proto.Message, timeout time.Duration, body operation.Body) (*connect.Response[holdpointv1.Operation], error) {
	request := operation.Request{ID: requestID, Verb: verb, Options: options, Timeout: timeout}
	op, err := d.Engine.Begin(ctx, request, body)
	if errdefs.Is(err, errdefs.NoSpace) && freesSpace(verb) && d.Reserve.Release() {
		op, err = d.Engine.Begin(ctx, request, body)
	}
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(op), nil
}

// freesSpace reports whether a verb is a way out of a full disk.
func freesSpace(verb string) bool {
	switch verb {
	case "stop", "rm", "checkpoint rm", "image rm":
		return true
	}
	return false
}

// Claim resolves a machine and leases it to the operation alone.
func (d *Desk) Claim(ctx context.Context, w *operation.Work, ref string) (catalog.Machine, error) {
	m, err := d.Catalog.ResolveMachine(ctx, ref)
	if err != nil {
		return m, err
	}
	w.Machine(m.ID, m.Name)
	claim := catalog.Claim{Kind: catalog.MachineResource, ID: m.ID, Exclusive: true}
	if err := d.Catalog.Acquire(ctx, w.ID(), LeaseTime, claim); err != nil {
		return m, err
	}
	// It may have changed before the lease.
	if m, err = d.Catalog.GetMachine(ctx, m.ID); err != nil {
		return m, err
	}
	d.News(w, m.ID)
	return m, d.Catalog.UseMachine(ctx, m.ID)
}

// News tells with the operation what was found out about the machine's
// checkpoints since the last one.
func (d *Desk) News(w *operation.Work, machineID string) {
	for _, line := range d.Prover.Untold(machineID) {
		w.Note("%s", line)
	}
}

// CheckBoots refuses, before anything is stopped for it, a disk that could not
// be booted: its image or its layers are damaged. what names whose it is.
func (d *Desk) CheckBoots(ctx context.Context, imageID string, layers []catalog.Layer, what string) error {
	if err := d.Keeper.CheckImage(ctx, imageID); err != nil {
		return errdefs.New(errdefs.KindOf(err), "%s: %w", what, err)
	}
	return d.Capturer.CheckLayers(layers, what)
}

// MachineID is the id of the machine that a request narrows itself to; empty
// when it names none.
func (d *Desk) MachineID(ctx context.Context, ref string) (string, error) {
	if ref == "" {
		return "", nil
	}
	m, err := d.Catalog.ResolveMachine(ctx, ref)
	return m.ID, err
}

// Checkpoint finds a checkpoint, of one machine where it is named.
func (d *Desk) Checkpoint(ctx context.Context, machineRef, ref string) (checkpoint.Checkpoint, error) {
	machineID, err := d.MachineID(ctx, machineRef)
	if err != nil {
		return checkpoint.Checkpoint{}, err
	}
	return d.Catalog.ResolveCheckpoint(ctx, machineID, ref)
}

// Commands are the commands that run in the machine, for people.
func (d *Desk) Commands(ctx context.Context, run *fleet.Run) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, factsTimeout)
	defer cancel()
	list, err := run.Agent().ListCommands(ctx, connect.NewRequest(&agentv1.ListCommandsRequest{}))
	if err != nil {
		return nil, wire.Decode(err)
	}
	var running []string
	for _, c := range list.Msg.GetCommands() {
		if c.GetRunning() {
			running = append(running, shellwords.Name(c.GetArgv()))
		}
	}
	return running, nil
}

// FullResult is where the time of a full checkpoint went, in the API's terms.
func FullResult(r capture.FullResult) *holdpointv1.CheckpointResult {
	p, w := r.Phases, r.Phases.Window
	return &holdpointv1.CheckpointResult{
		DowntimeMs: Milliseconds(r.Downtime), ReturnMs: Milliseconds(r.Return), DurableMs: Milliseconds(r.Durable),
		MemoryBytes: r.MemoryBytes, DiskBytes: r.DiskBytes, PrecopyMs: Milliseconds(p.Precopy),
		WindowStopMs: Milliseconds(w.Stop), WindowDevicesMs: Milliseconds(w.Devices), WindowSwitchMs: Milliseconds(w.Switch),
		WindowPagesMs: Milliseconds(w.Pages), WindowResumeMs: Milliseconds(w.Resume),
		PrecopiedBytes: p.PrecopiedBytes, WindowBytes: p.WindowBytes, PrecopyRounds: uint32(p.Rounds),
		PrepareMs: Milliseconds(r.Prepare), SyncDiskMs: Milliseconds(p.SyncDisk), CaptureMs: Milliseconds(r.Capture),
		EncodeMs: Milliseconds(r.Encode), PublishMs: Milliseconds(r.Publish),
	}
}

// Milliseconds is a duration in the API's terms.
func Milliseconds(t time.Duration) float64 { return float64(t.Microseconds()) / 1000 }
