//go:build linux

package keeper

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/diskchain"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image"
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
	if len(open) < diskchain.Step {
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
	r, worth, err := k.cfg.Chains.Shorten(ctx, rootOf(img), chain, open)
	if err != nil || !worth {
		return false, err
	}
	if err := run.ReplaceLayers(ctx, r.FirstID, r.LastID, r.Merged); err != nil {
		return false, fmt.Errorf("shorten the disk of %s: %w", m.Name, err)
	}
	return true, nil
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

// freshDisk is how long a merged disk is kept that no run has recorded yet: its
// run may be about to begin.
const freshDisk = 10 * time.Minute

// OpensDisk reports whether some run reads the merged disk at path, or may be
// about to.
func (k *Keeper) OpensDisk(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || time.Since(info.ModTime()) < freshDisk {
		return true
	}
	dirs, err := filepath.Glob(filepath.Join(k.cfg.Home.Runs(), "*"))
	if err != nil {
		return true
	}
	for _, dir := range dirs {
		record, err := monitor.ReadRecord(dir)
		if err != nil && !errdefs.Is(err, errdefs.NotFound) {
			return true // nobody can tell
		}
		for _, layer := range record.Disk {
			if record.Phase != monitor.Exited && layer.Path == path {
				return true
			}
		}
	}
	return false
}
