//go:build linux

package proof

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
)

// Trust refuses (STORAGE) layers of a checkpoint that are known to be damaged,
// so that no guest gets them: those that a checkpoint rests on which failed its
// proof, this one or another, are read again. What failed for another reason,
// such as a guest that did not answer in time, is trusted. It costs nothing
// while no checkpoint has failed.
func (p *Prover) Trust(ctx context.Context, k checkpoint.Checkpoint, layers ...string) error {
	bad, _, err := p.firstBad(ctx, layers)
	if bad != "" {
		return fmt.Errorf("checkpoint %s: its layer %s: %w; choose another checkpoint", k.ID, bad, err)
	}
	return err
}

// TrustLayers is Trust of layers that are no checkpoint's yet.
func (p *Prover) TrustLayers(ctx context.Context, layers ...string) error {
	bad, _, err := p.firstBad(ctx, layers)
	if bad != "" {
		return fmt.Errorf("layer %s: %w", bad, err)
	}
	return err
}

// TrustDisk is Trust of the disk that a machine is to boot.
func (p *Prover) TrustDisk(ctx context.Context, m catalog.Machine) error {
	chain, err := p.cfg.Catalog.Chain(ctx, m.ID)
	if err != nil {
		return err
	}
	var layers []string
	for _, l := range chain {
		layers = append(layers, l.ID)
	}
	bad, touched, err := p.firstBad(ctx, layers)
	if bad != "" {
		return fmt.Errorf("its disk has layer %s, on which %s: %w; put the machine back to a checkpoint without it, of those in holdpoint checkpoint ls %s, by: holdpoint restore %s CHECKPOINT --disk",
			bad, restOn(touched), err, m.Name, m.Name)
	}
	return err
}

// firstBad reads those of the layers again that a checkpoint rests on which
// failed its proof. bad is the first that is damaged, as err says, and touched
// are all checkpoints that rest on it; without one err is any other failure.
func (p *Prover) firstBad(ctx context.Context, layers []string) (bad string, touched []checkpoint.Checkpoint, err error) {
	list, err := p.cfg.Catalog.ListCheckpoints(ctx, "")
	if err != nil {
		return "", nil, err
	}
	suspects := map[string]bool{}
	for _, other := range list {
		if other.Verification != checkpoint.Failed {
			continue
		}
		for _, id := range LayersOf(other) {
			suspects[id] = true
		}
	}
	layers = slices.DeleteFunc(slices.Clone(layers), func(id string) bool { return !suspects[id] })
	found, err := p.cfg.Catalog.GetLayers(ctx, layers...)
	if err != nil {
		return "", nil, err
	}
	for _, l := range found {
		if _, err := p.checkLayer(ctx, l); err != nil {
			if ctx.Err() != nil {
				return "", nil, err // which says nothing about the layer
			}
			list = slices.DeleteFunc(list, func(k checkpoint.Checkpoint) bool { return !slices.Contains(LayersOf(k), l.ID) })
			return l.ID, list, err
		}
	}
	return "", nil, nil
}

// restOn names checkpoints, the newest ones of many.
func restOn(list []checkpoint.Checkpoint) string {
	const most = 3
	var names []string
	for _, k := range list[:min(len(list), most)] {
		names = append(names, nameOf(k))
	}
	text := strings.Join(names, ", ")
	switch more := len(list) - most; {
	case len(list) == 1:
		return "checkpoint " + text + " rests"
	case more > 0:
		text += fmt.Sprintf(" and %d more", more)
	}
	return "checkpoints " + text + " rest"
}

// LayersOf are all layers that a checkpoint rests on.
func LayersOf(k checkpoint.Checkpoint) []string {
	if k.Full == nil {
		return slices.Clone(k.Layers)
	}
	return slices.Concat(k.Layers, k.Full.Memory, []string{k.Full.Devices})
}
