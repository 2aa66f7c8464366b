//go:build linux

// Package firstboot keeps the first boot of an image, for each shape of
// machine, as a full checkpoint of a guest that was not told yet who it is: the
// next machine continues from there instead of booting. It decides which one
// fits; the machine that continues is made as a fork is, elsewhere.
package firstboot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// kept is how many boots of one image are kept. More shapes than that are
// seldom in use, and each takes the memory of a booted guest.
const kept = 4

// Config is what Boots works with.
type Config struct {
	Catalog  *catalog.Catalog
	Keeper   *keeper.Keeper
	Capturer *capture.Capturer
	// Off boots every machine.
	Off bool
	Log *slog.Logger
}

// Boots are the kept boots of all images. It has no state of its own.
type Boots struct{ cfg Config }

// New returns Boots.
func New(cfg Config) *Boots { return &Boots{cfg: cfg} }

// Shape is what a machine must have in common with another one to continue
// from its boot, as a digest; empty where boots are not kept.
func (b *Boots) Shape(ctx context.Context, m catalog.Machine) (string, error) {
	if b.cfg.Off {
		return "", nil
	}
	platform, err := b.cfg.Keeper.Platform(ctx, m)
	if err != nil {
		return "", err
	}
	made, err := b.cfg.Keeper.BootedFrom(ctx, m)
	if err != nil {
		return "", err
	}
	encoded, err := json.Marshal(map[string]any{
		"platform": platform, "booted_from": made, "disk_bytes": m.Spec.DiskBytes, "init": m.Spec.Init,
	})
	if err != nil {
		return "", fmt.Errorf("describe machine %s: %w", m.Name, err)
	}
	digest := sha256.Sum256(encoded)
	return hex.EncodeToString(digest[:16]), nil
}

// Find gives the kept boot of the image for a shape.
func (b *Boots) Find(ctx context.Context, buildID, shape string) (k checkpoint.Checkpoint, found bool, err error) {
	if shape == "" {
		return k, false, nil
	}
	k, err = b.cfg.Catalog.ImageBoot(ctx, buildID, shape)
	if errdefs.Is(err, errdefs.NotFound) {
		return k, false, nil
	}
	return k, err == nil, err
}

// Boot boots a new machine of the shape and keeps its boot for the next one. A
// boot that cannot be kept is noted, and no failure.
func (b *Boots) Boot(ctx context.Context, w *operation.Work, machineID, shape string) error {
	if shape == "" {
		note, err := b.cfg.Keeper.Boot(ctx, machineID)
		tell(w, note)
		return err
	}
	note, err := b.cfg.Keeper.BootUnconfigured(ctx, machineID)
	if err != nil {
		return err
	}
	tell(w, note)
	m, err := b.cfg.Catalog.GetMachine(ctx, machineID)
	if err != nil {
		return err
	}
	source := &source{Source: b.cfg.Keeper.Source(m.ID, b.cfg.Keeper.Run(m.ID), 0, w.Note), over: make(chan struct{})}
	captured := make(chan error, 1)
	go func() {
		_, err := b.cfg.Capturer.Full(ctx, capture.FullRequest{
			Operation: w.ID(), Machine: m, Checkpoint: checkpoint.Checkpoint{ID: durable.NewID()}, Source: source,
			ImageBoot: &capture.ImageBoot{Shape: shape}, Note: w.Note,
			// The machine stays or goes as a whole, by the phase of its creation.
			Enter: func(context.Context, string, string, any) error { return nil },
		})
		captured <- err
	}()
	// The guest goes on as soon as its window is closed; what was captured is
	// made durable beside.
	var failure error
	select {
	case <-source.over:
		failure = b.cfg.Keeper.Activate(ctx, machineID)
		err = <-captured
	case err = <-captured:
		failure = b.cfg.Keeper.Activate(ctx, machineID)
	}
	switch {
	case err == nil:
		b.drop(ctx, m.ImageBuildID)
	case !errdefs.Is(err, errdefs.AlreadyExists): // another one was faster
		b.cfg.Log.Warn("keep the boot of an image", "image", m.ImageBuildID, "error", err)
		if failure == nil {
			w.Note("this boot could not be kept for the next machine (%v); it will boot, too", err)
		}
	}
	return failure
}

func tell(w *operation.Work, note string) {
	if note != "" {
		w.Note("%s", note)
	}
}

// source tells when the capture is over as far as the guest can notice.
type source struct {
	*keeper.Source
	over chan struct{}
}

// Capture is that of the run.
func (s *source) Capture(ctx context.Context, o capture.CaptureOrder) (capture.CaptureReport, error) {
	defer close(s.over)
	return s.Source.Capture(ctx, o)
}

// Drop forgets a kept boot that could not be continued.
func (b *Boots) Drop(ctx context.Context, k checkpoint.Checkpoint) error {
	err := b.cfg.Catalog.DropImageBoot(ctx, k.ID)
	if errdefs.Is(err, errdefs.NotFound) {
		return nil
	}
	return err
}

// drop forgets the oldest boots of an image that has many.
func (b *Boots) drop(ctx context.Context, buildID string) {
	list, err := b.cfg.Catalog.ImageBoots(ctx, buildID)
	for i := kept; err == nil && i < len(list); i++ {
		err = b.Drop(ctx, list[i])
		if errdefs.Is(err, errdefs.Referenced) {
			err = nil // a machine is just made from it
		}
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		b.cfg.Log.Warn("forget old boots of an image", "image", buildID, "error", err)
	}
}
