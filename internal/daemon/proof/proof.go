//go:build linux

// Package proof finds out whether checkpoints can be restored, by doing it
// aside: every digest is checked, and a full checkpoint is continued in a run
// that is nobody's, has a disk of its own on top, and is ended once its guest
// has answered. It changes nothing but what is recorded of that.
package proof

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/memory"
	"github.com/holdpoint/holdpoint/internal/sparse"
	"github.com/holdpoint/holdpoint/internal/store"
)

// endTimeout bounds the end of the run aside, and the record of what it proved.
const endTimeout = 30 * time.Second

// Config is what a Prover works with.
type Config struct {
	Home     *home.Home
	Files    *durable.FS
	Catalog  *catalog.Catalog
	Keeper   *keeper.Keeper
	Memory   *memory.Cache
	Capturer *capture.Capturer
	Overlays capture.Overlays
	Engine   *operation.Engine
	// When says when checkpoints are proven unasked: Off never, Now without
	// waiting for a quiet host, else when the host is quiet.
	When string
	Log  *slog.Logger
}

// The values of Config.When besides the empty one.
const (
	Off = "off"
	Now = "now"
)

// Prover proves checkpoints, one at a time. Its life: New; Look whenever there
// may be new ones; Close.
type Prover struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	look   chan struct{}

	// aside is held while a run aside lives.
	aside sync.Mutex

	mu sync.Mutex
	// tried could not be judged; they are left until somebody asks.
	tried map[string]bool
	// untold are failures that the next operation on their machine tells of.
	untold map[string][]string
	// stop ends the proof under way of a machine's checkpoint.
	stop    context.CancelFunc
	machine string
}

// New returns a Prover.
func New(cfg Config) *Prover {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Prover{
		cfg: cfg, ctx: ctx, cancel: cancel, look: make(chan struct{}, 1),
		tried: map[string]bool{}, untold: map[string][]string{},
	}
	p.wg.Go(p.work)
	return p
}

// Close ends what is under way and waits for that.
func (p *Prover) Close() {
	p.cancel()
	p.wg.Wait()
}

// Proven says what was found right.
type Proven struct {
	Layers int
	Bytes  int64
	// Restored: continued aside, and its guest answered.
	Restored bool
}

// Prove proves a checkpoint now. What it finds is recorded; an error that says
// nothing about the checkpoint, such as a host that cannot continue it, changes
// nothing.
func (p *Prover) Prove(ctx context.Context, k checkpoint.Checkpoint, progress func(done, total int64)) (Proven, error) {
	proven, err := p.digests(ctx, k, progress)
	if err == nil {
		err = p.cfg.Keeper.CheckDisk(ctx, k.Layers)
	}
	if err == nil && k.Full != nil {
		// The layers are sound; so has to be the file that was made of them.
		_, err = p.cfg.Memory.Check(ctx, k)
	}
	if err == nil && k.Full != nil {
		err = p.restoreAside(ctx, k)
		if errdefs.Is(err, errdefs.WrongState) && ctx.Err() == nil {
			// Its process ended. The host may have ended it, short of memory:
			// once is not the checkpoint's fault.
			err = p.restoreAside(ctx, k)
		}
		proven.Restored = err == nil
	}
	recording, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	switch {
	case err == nil:
		return proven, p.cfg.Catalog.SetVerification(recording, k.ID, checkpoint.Verified, "")
	case ctx.Err() != nil || !condemns(err):
		return proven, err
	}
	if _, gone := p.cfg.Catalog.GetCheckpoint(recording, k.ID); errdefs.Is(gone, errdefs.NotFound) {
		return proven, gone
	}
	return proven, errors.Join(err, p.cfg.Catalog.SetVerification(recording, k.ID, checkpoint.Failed, err.Error()))
}

// condemns reports whether an error says that the checkpoint itself cannot be
// restored: its bytes are damaged, or its guest ended or stayed silent.
func condemns(err error) bool {
	return errdefs.Is(err, errdefs.Storage) || errdefs.Is(err, errdefs.WrongState) || errdefs.Is(err, errdefs.Deadline)
}

// digests reads all layers that the checkpoint rests on. A digest that is not
// known yet, of a large layer that was just sealed, is recorded; a file that is
// not as recorded is STORAGE.
func (p *Prover) digests(ctx context.Context, k checkpoint.Checkpoint, progress func(done, total int64)) (Proven, error) {
	layers, err := p.cfg.Catalog.GetLayers(ctx, LayersOf(k)...)
	if err != nil {
		return Proven{}, err
	}
	var proven Proven
	var total int64
	for _, l := range layers {
		info, err := os.Lstat(p.path(l))
		switch {
		case err != nil:
		case l.Format == catalog.RawFormat:
			total += l.StoredBytes
		default:
			total += info.Size()
		}
	}
	for _, l := range layers {
		n, err := p.checkLayer(ctx, l)
		if err != nil {
			return proven, errdefs.New(errdefs.KindOf(err), "its layer %s: %w", l.ID, err)
		}
		proven.Layers++
		proven.Bytes += n
		progress(proven.Bytes, total)
	}
	return proven, nil
}

func (p *Prover) path(l catalog.Layer) string {
	return filepath.Join(p.cfg.Home.Dir(), filepath.FromSlash(l.Path))
}

func (p *Prover) checkLayer(ctx context.Context, l catalog.Layer) (bytes int64, err error) {
	path := p.path(l)
	find := disk.Digest
	switch l.Format {
	case catalog.MemoryFormat:
		find = rootDigest
	case catalog.RawFormat:
		find = sparse.DigestFile
	}
	digest, bytes, err := find(ctx, path)
	switch {
	case errdefs.Is(err, errdefs.NotFound):
		return bytes, errdefs.As(errdefs.Storage, err)
	case err != nil:
		return bytes, err
	case l.Digest != "" && l.Digest != digest:
		return bytes, errdefs.New(errdefs.Storage, "it has changed since it was sealed: it has the digest %s, not %s", digest, l.Digest)
	case l.Format == catalog.Qcow2Format:
		if err := p.cfg.Overlays.CheckFile(path); err != nil {
			return bytes, errdefs.New(errdefs.Storage, "it is damaged: %w", err)
		}
	}
	if l.Digest == "" && l.State == catalog.LayerSealed {
		err = p.cfg.Catalog.MeasureLayers(ctx, catalog.Measured{ID: l.ID, Bytes: bytes, Digest: digest})
	}
	return bytes, err
}

// rootDigest is the digest that stands for a memory layer, and its size. Every
// frame is checked by its own digest.
func rootDigest(ctx context.Context, path string) (digest string, bytes int64, err error) {
	layer, err := store.Open(path)
	if err != nil {
		return "", 0, err
	}
	info := layer.Info()
	return info.Digest.String(), info.Bytes, errors.Join(layer.Verify(ctx), layer.Close())
}

// restoreAside continues the checkpoint in a run that is nobody's. Its top lies
// in the run's own folder and goes with it: no record tells of either, and what
// a crash leaves of them is ended and removed at the next start.
func (p *Prover) restoreAside(ctx context.Context, k checkpoint.Checkpoint) error {
	p.aside.Lock()
	defer p.aside.Unlock()
	m, l, release, err := p.cfg.Keeper.Load(ctx, k)
	if err != nil {
		return err
	}
	defer release()
	dir := p.cfg.Home.Run(l.RunID)
	if err := p.cfg.Files.MkdirAll(dir); err != nil {
		return err
	}
	top := catalog.Layer{ID: durable.NewID(), Format: catalog.Qcow2Format, VirtualBytes: m.Spec.DiskBytes}
	top.Path = filepath.ToSlash(filepath.Join("runs", l.RunID, "top.qcow2"))
	err = p.cfg.Overlays.Create(ctx, p.path(top), top.VirtualBytes)
	if err == nil {
		l.Chain, l.AsIs = append(l.Chain, top), true
		_, err = p.cfg.Keeper.Begin(ctx, m, l)
	}
	if err != nil {
		return errors.Join(err, p.cfg.Files.RemoveAll(dir))
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	return p.cfg.Keeper.End(ending, "", l.RunID)
}
