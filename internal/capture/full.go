package capture

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/store"
)

// settleTimeout bounds telling a run what became of its capture, and taking
// back what was prepared for one that failed.
const settleTimeout = time.Minute

// The phases of a full checkpoint besides PhasePrepare, in the journal. From
// PhaseCapture on the prepared top may be written to. Publication is no phase
// of its own: the checkpoint is in the catalog, or it is not.
const (
	PhaseCapture = "capture"
	PhaseEncode  = "encode"
)

// FullDetail is what the journal keeps of a checkpoint of a machine that runs on,
// full or frozen, to finish or undo it from any phase.
type FullDetail struct {
	CheckpointID string `json:"checkpoint_id"`
	// RunID is the run it is taken of.
	RunID string `json:"run_id"`
	// Layer is the prepared top; empty until it is.
	Layer string `json:"layer,omitempty"`
	// Dir is the staging folder; empty for a frozen checkpoint, which has none.
	Dir string `json:"dir"`
	// StayPaused: the run waits to be told how it goes on.
	StayPaused bool `json:"stay_paused,omitempty"`
}

// ImageBoot makes a full checkpoint the one of an image's first boot: no
// machine's, listed nowhere, and of a guest that was not told who it is.
type ImageBoot struct {
	// Shape is what a machine must have in common to continue from it.
	Shape string
}

// FullRequest asks for a full checkpoint.
type FullRequest struct {
	// Operation has the leases that the new layers are kept by.
	Operation string
	Machine   catalog.Machine
	// Checkpoint has the id, name, message, routes, origin and automatic.
	Checkpoint checkpoint.Checkpoint
	Source     FullSource
	// StayPaused keeps the run paused, also after the checkpoint is published:
	// Decide ends that. Of a run that the user has paused it is not wanted.
	StayPaused bool
	ImageBoot  *ImageBoot
	// Enter records a phase before its first effect; detail is a FullDetail.
	Enter func(ctx context.Context, phase, text string, detail any) error
	// Note is told what a person should read.
	Note func(format string, args ...any)
}

// FullResult is a published full checkpoint and where the time went.
type FullResult struct {
	Checkpoint checkpoint.Checkpoint
	Detail     FullDetail
	Phases     Phases
	// Downtime is the window's.
	Downtime time.Duration
	// Return and Durable are from the request to the guest running with the
	// right time, and to the durable record. Return is 0 where the guest's time
	// was not corrected by the end, or the run was kept paused.
	Return, Durable time.Duration
	// Prepare, Capture, Encode and Publish are what Durable consists of.
	Prepare, Capture, Encode, Publish time.Duration
	// MemoryBytes and DiskBytes are what it takes on the host for itself.
	MemoryBytes, DiskBytes int64
}

// Full takes a full checkpoint: capture, encode, publish. The run goes on from
// the end of its window, long before the checkpoint is published, unless the
// request says otherwise. On error nothing is published and the run goes on as
// before, with its disk's old top or its new one.
func (c *Capturer) Full(ctx context.Context, r FullRequest) (FullResult, error) {
	t := &taking{Capturer: c, FullRequest: r, began: time.Now()}
	release, err := t.openParent(ctx)
	if err != nil {
		return FullResult{}, fmt.Errorf("checkpoint of %s: %w", r.Machine.Name, err)
	}
	defer release()
	if err := t.checkRoom(); err != nil {
		return FullResult{}, err
	}
	if err := t.prepare(ctx); err != nil {
		return FullResult{}, err
	}
	t.result.Prepare = time.Since(t.began)
	err = t.capture(ctx)
	if err == nil {
		err = t.encode(ctx)
	}
	if err == nil {
		err = t.publish(ctx)
	}
	if err != nil {
		if published, unknown := t.published(ctx, t.Checkpoint.ID); !published {
			return FullResult{}, t.abandon(ctx, errors.Join(err, unknown), unknown == nil)
		}
	}
	t.result.Durable = time.Since(t.began)
	if !r.StayPaused {
		t.tell(ctx)
	}
	return t.result, nil
}

// taking is one full checkpoint under way.
type taking struct {
	*Capturer
	FullRequest
	began  time.Time
	detail FullDetail
	result FullResult
	// chain is the parent's memory, lowest first, and previous shows it.
	chain    []catalog.Layer
	previous *store.View
	// whole: all of the memory is kept, changed or not.
	whole bool
	// below are the disk's layers that the checkpoint owns, and top the new one.
	below []catalog.Layer
	top   catalog.Layer
	// memory and devices are its own layers.
	memory, devices catalog.Layer
	// ordered is when the run was asked, and report what it said.
	ordered time.Time
	report  CaptureReport
	sealed  []string
	// measured are the layers of the disk that were sealed.
	measured []catalog.Measured
}

// checkRoom refuses (NO_SPACE) when the staging folder and the layers could
// become larger than what is free.
func (t *taking) checkRoom() error {
	if err := t.CheckSpace(); err != nil {
		return err
	}
	changed := t.Machine.Spec.MemoryBytes
	if bound := t.Source.ChangedBytes(); bound > 0 && !t.whole {
		changed = min(changed, bound)
	}
	free, err := durable.FreeBytes(t.cfg.Home.Layers())
	if err != nil {
		return err
	}
	if need := minFree + 2*changed; free < need {
		return errdefs.New(errdefs.NoSpace,
			"checkpoint of %s: %d MiB of its memory may have to be written twice, and %s has %d MiB free; free some space or remove checkpoints",
			t.Machine.Name, changed>>20, t.cfg.Home.Dir(), free>>20)
	}
	return nil
}

// openParent opens the memory that the checkpoint will be a difference of. One
// that is damaged is of no use to any later checkpoint: this one then keeps all
// of the memory, which the run still has.
func (t *taking) openParent(ctx context.Context) (release func(), err error) {
	if t.chain, err = t.cfg.Catalog.MemoryChain(ctx, t.Machine.ID); err != nil || len(t.chain) == 0 {
		return func() {}, err
	}
	if t.cfg.Trust != nil {
		var layers []string
		for _, l := range t.chain {
			layers = append(layers, l.ID)
		}
		err = t.cfg.Trust(ctx, layers...)
	}
	if err == nil {
		t.previous, release, err = t.cfg.Memory.View(ctx, t.chain)
	}
	switch {
	case errdefs.Is(err, errdefs.Storage):
		t.Note("all of the memory of %s is kept, because what it is a difference of cannot be read: %v", t.Machine.Name, err)
		t.chain, t.previous, t.whole = nil, nil, true
		return func() {}, nil
	case err != nil:
		return func() {}, err
	}
	return release, nil
}

// prepare makes the new top and names all that is to come.
func (t *taking) prepare(ctx context.Context) error {
	m := t.Machine
	t.detail = FullDetail{
		CheckpointID: t.Checkpoint.ID, RunID: m.RunID, StayPaused: t.StayPaused,
		Dir: filepath.Join(t.cfg.Home.Run(m.RunID), "capture-"+t.Checkpoint.ID),
	}
	if err := t.Enter(ctx, PhasePrepare, "preparing the next overlay", t.detail); err != nil {
		return err
	}
	top, err := t.Prepare(ctx, m)
	if err != nil {
		return err
	}
	t.top, t.detail.Layer = top, top.ID
	chain, err := t.cfg.Catalog.Chain(ctx, m.ID)
	if err == nil && len(chain) < 2 {
		err = errdefs.New(errdefs.Internal, "checkpoint of %s: its chain has %d layers, no top was prepared", m.Name, len(chain))
	}
	if err == nil {
		t.below = chain[:len(chain)-1]
		err = t.Enter(ctx, PhaseCapture, "capturing the memory", t.detail)
	}
	if err != nil {
		return errors.Join(err, t.Discard(context.WithoutCancel(ctx), m.ID, top.ID))
	}
	return nil
}

// publish makes the checkpoint visible in one commit.
func (t *taking) publish(ctx context.Context) error {
	publishing := time.Now()
	k, m := t.Checkpoint, t.Machine
	k.Kind, k.Consistency, k.Verification, k.CreatedAt = checkpoint.Full, checkpoint.Crash, checkpoint.Unverified, time.Now()
	k.MachineID, k.Parent, k.ImageBuildID, k.DiskBytes = m.ID, m.Head, m.ImageBuildID, t.result.DiskBytes
	for _, layer := range t.below {
		k.Layers = append(k.Layers, layer.ID)
	}
	k.Full = &checkpoint.FullState{
		Devices: t.devices.ID, MemoryBytes: t.memory.StoredBytes, Tracking: t.report.Tracking, Platform: t.report.Platform,
		LinkMagic: m.LinkMagic, Unconfigured: t.ImageBoot != nil,
	}
	for _, layer := range append(slices.Clone(t.chain), t.memory) {
		k.Full.Memory = append(k.Full.Memory, layer.ID)
	}
	var err error
	if k.Spec, err = encodeSpec(m.Spec); err != nil {
		return err
	}
	measured := t.measured
	for _, layer := range []catalog.Layer{t.memory, t.devices} {
		measured = append(measured, catalog.Measured{ID: layer.ID, Bytes: layer.StoredBytes, Digest: layer.Digest})
	}
	if t.ImageBoot != nil {
		k.MachineID, k.Parent = "", ""
		err = t.cfg.Catalog.PublishImageBoot(ctx, t.ImageBoot.Shape, k, t.sealed, m.ID, measured...)
	} else {
		err = t.cfg.Catalog.PublishCheckpoint(ctx, k, t.sealed, measured...)
	}
	t.result.Checkpoint, t.result.Detail, t.result.MemoryBytes = k, t.detail, t.memory.StoredBytes
	t.result.Publish = time.Since(publishing)
	return err
}

// measureDisk measures the layers of the disk, as far as it is not known.
func (t *taking) measureDisk(ctx context.Context) error {
	for _, layer := range t.below {
		if layer.StoredBytes != 0 {
			continue
		}
		m, err := t.measure(ctx, layer, digestBefore)
		if err != nil {
			return err
		}
		t.measured = append(t.measured, m)
	}
	return nil
}

// published asks the catalog, because a commit that failed may have happened.
func (c *Capturer) published(ctx context.Context, checkpointID string) (published bool, unknown error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	_, err := c.cfg.Catalog.GetCheckpoint(ctx, checkpointID)
	if errdefs.Is(err, errdefs.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// tell ends the capture of a published checkpoint, whose guest's clock was
// corrected meanwhile. A run that cannot be told counts its pages from an older
// one: the next checkpoint is larger.
func (t *taking) tell(ctx context.Context) {
	settled, err := t.decide(ctx, t.Source, t.detail, true, false)
	if err != nil {
		t.Note("the run of %s could not be told of the checkpoint (%v); the next one may be larger", t.Machine.Name, err)
	}
	if settled.ClockTrouble != "" {
		t.Note("the clock of the guest could not be corrected after the checkpoint: %s", settled.ClockTrouble)
	}
	if settled.Returned > 0 {
		t.result.Return = t.ordered.Sub(t.began) + settled.Returned
	}
}

// abandon takes back a checkpoint that is not published; the run goes on. Unless
// that is certain its files stay: the next sweep knows.
func (t *taking) abandon(ctx context.Context, failure error, certain bool) error {
	for _, layer := range []catalog.Layer{t.memory, t.devices} {
		if layer.ID != "" && certain {
			t.RemoveFile(t.Path(layer)) // its record goes with the operation
		}
	}
	// A run that is told so by mistake counts more pages, never fewer.
	return t.takeBack(ctx, t.Machine, t.Source, t.detail, failure)
}

// takeBack takes back what was prepared for a checkpoint that is not published; the
// run goes on.
func (c *Capturer) takeBack(ctx context.Context, m catalog.Machine, source FullSource, d FullDetail, failure error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	if err := c.undo(ctx, m, source, d, true); err != nil {
		return errdefs.New(errdefs.KindOf(failure), "checkpoint of %s: %w; and taking it back: %w", m.Name, failure, err)
	}
	return fmt.Errorf("checkpoint of %s: %w", m.Name, failure)
}
