//go:build linux

package proof

import (
	"context"
	"fmt"
	"slices"

	"github.com/holdpoint/holdpoint/internal/checkpoint"
)

// Trust refuses (STORAGE) layers of a checkpoint that are known to be damaged,
// so that no guest gets them: those that a checkpoint rests on which failed its
// proof, this one or another, are read again. What failed for another reason,
// such as a guest that did not answer in time, is trusted. It costs nothing
// while no checkpoint has failed.
func (p *Prover) Trust(ctx context.Context, k checkpoint.Checkpoint, layers ...string) error {
	list, err := p.cfg.Catalog.ListCheckpoints(ctx, "")
	if err != nil {
		return err
	}
	suspects := map[string]bool{}
	for _, other := range list {
		if other.Full == nil || other.Full.Verification != checkpoint.Failed {
			continue
		}
		for _, id := range LayersOf(other) {
			suspects[id] = true
		}
	}
	layers = slices.DeleteFunc(slices.Clone(layers), func(id string) bool { return !suspects[id] })
	found, err := p.cfg.Catalog.GetLayers(ctx, layers...)
	if err != nil {
		return err
	}
	for _, l := range found {
		if _, err := p.checkLayer(ctx, l); err != nil {
			return fmt.Errorf("checkpoint %s: its layer %s: %w; choose another checkpoint", k.ID, l.ID, err)
		}
	}
	return nil
}

// LayersOf are all layers that a checkpoint rests on.
func LayersOf(k checkpoint.Checkpoint) []string {
	if k.Full == nil {
		return slices.Clone(k.Layers)
	}
	return slices.Concat(k.Layers, k.Full.Memory, []string{k.Full.Devices})
}
