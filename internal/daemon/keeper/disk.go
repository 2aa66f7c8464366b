//go:build linux

package keeper

import (
	"context"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/diskchain"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// Shorten merges layers of a running machine's disk, if it has so many open that
// it is worth it, and puts the merged one in their place. The machine runs on.
func (k *Keeper) Shorten(ctx context.Context, m catalog.Machine) (shorter bool, err error) {
	run := k.Run(m.ID)
	if run == nil || run.Lost() != nil {
		return false, nil
	}
	open := run.Status().GetDisk()
	if !diskchain.Worth(open) {
		return false, nil
	}
	chain, err := k.cfg.Catalog.Chain(ctx, m.ID)
	if err != nil {
		return false, err
	}
	img, err := image.Open(filepath.Join(k.cfg.Home.Images(), m.ImageBuildID))
	if err != nil {
		return false, err
	}
	return k.cfg.Chains.Shorten(ctx, rootOf(img), chain, open, func(r diskchain.Replacement) error {
		return run.ReplaceLayers(ctx, r.FirstID, r.LastID, r.Merged)
	})
}

// CheckDisk reads what the layers of a checkpoint's disk were merged into, and
// gives up what is damaged.
func (k *Keeper) CheckDisk(ctx context.Context, ids []string) error {
	layers, err := k.cfg.Catalog.GetLayers(ctx, ids...)
	if err != nil {
		return err
	}
	return k.cfg.Chains.Check(ctx, append(layers, catalog.Layer{})) // with a top, as it is opened
}

// Chains are the recorded disks of all machines.
func (k *Keeper) Chains(ctx context.Context) (chains [][]catalog.Layer, err error) {
	machines, err := k.cfg.Catalog.ListMachines(ctx)
	if err != nil {
		return nil, err
	}
	for _, m := range machines {
		chain, err := k.cfg.Catalog.Chain(ctx, m.ID)
		if err != nil {
			return nil, err
		}
		chains = append(chains, chain)
	}
	return chains, nil
}

// OpenDisks are the files of all disks that runs have open, or are to; known is
// false when that cannot be told of some run.
func (k *Keeper) OpenDisks() (paths map[string]bool, known bool) {
	dirs, err := filepath.Glob(filepath.Join(k.cfg.Home.Runs(), "*"))
	if err != nil {
		return nil, false
	}
	paths = map[string]bool{}
	for _, dir := range dirs {
		disk, err := diskOf(dir)
		if err != nil {
			return nil, false
		}
		for _, layer := range disk {
			paths[layer.Path] = true
		}
	}
	return paths, true
}

// diskOf is the disk of the run in a folder, nil once it has ended: what its
// monitor has recorded, or was given to begin with.
func diskOf(dir string) ([]machine.Layer, error) {
	record, err := monitor.ReadRecord(dir)
	switch {
	case err == nil && record.Phase == monitor.Exited:
		return nil, nil
	case err == nil:
		return record.Disk, nil
	case !errdefs.Is(err, errdefs.NotFound):
		return nil, err
	}
	cfg, err := monitor.ReadConfig(dir)
	if errdefs.Is(err, errdefs.NotFound) {
		return nil, nil
	}
	return cfg.Run.Disk, err
}
