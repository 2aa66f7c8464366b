//go:build linux

package keeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// nobody is a machine that a checkpoint's runs are made for before they are
// anyone's: it has the checkpoint's shape and no name of its own.
func nobody(k checkpoint.Checkpoint) (catalog.Machine, error) {
	m := catalog.Machine{Name: "standby-" + k.ID[:6], ImageBuildID: k.ImageBuildID, LinkMagic: k.Full.LinkMagic}
	if err := json.Unmarshal(k.Spec, &m.Spec); err != nil {
		return m, errdefs.New(errdefs.Storage, "read spec of checkpoint %s: %w", k.ID, err)
	}
	return m, nil
}

// EndUnknown ends all runs that are not known, by their own id and that of the
// machine they were begun for, and removes their folders.
func (k *Keeper) EndUnknown(known func(runID, machineID string) bool) error {
	entries, err := os.ReadDir(k.cfg.Home.Runs())
	if err != nil {
		return errdefs.New(errdefs.Storage, "list runs: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		if !known(entry.Name(), monitor.Owner(k.cfg.Home.Run(entry.Name()))) {
			k.cfg.Log.Info("end a run that is nobody's", "run", entry.Name())
			errs = append(errs, k.fleet.End(entry.Name()))
		}
	}
	return errors.Join(append(errs, k.removeSockets())...)
}

// removeSockets removes the folders of sockets of runs that have none of their own.
func (k *Keeper) removeSockets() error {
	entries, err := os.ReadDir(filepath.Dir(k.cfg.Home.RunSockets("any")))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errdefs.New(errdefs.Storage, "list sockets of runs: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		if _, err := os.Lstat(k.cfg.Home.Run(entry.Name())); errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, k.cfg.Files.RemoveAll(k.cfg.Home.RunSockets(entry.Name())))
		}
	}
	return errors.Join(errs...)
}

// Load prepares a run that continues a full checkpoint and is nobody's yet: the
// machine it is made for, which has no name of its own, what it loads, and the
// disk below its top, which the caller adds. Until release the memory file
// stays. A checkpoint that cannot be continued on this host is INCOMPATIBLE.
func (k *Keeper) Load(ctx context.Context, from checkpoint.Checkpoint) (m catalog.Machine, l restore.Launch, release func(), err error) {
	if m, err = nobody(from); err != nil {
		return m, l, nil, err
	}
	var then machine.Platform
	if err := json.Unmarshal(from.Full.Platform, &then); err != nil {
		return m, l, nil, errdefs.New(errdefs.Storage, "read platform of checkpoint %s: %w", from.ID, err)
	}
	here, err := k.Platform(ctx, m)
	if err != nil {
		return m, l, nil, err
	}
	restoreDisk := fmt.Sprintf("holdpoint restore MACHINE %s --disk", from.ID)
	if err := then.Check(here, "checkpoint "+from.ID, restoreDisk); err != nil {
		return m, l, nil, err
	}
	layers, err := k.cfg.Catalog.GetLayers(ctx, append(slices.Clone(from.Layers), from.Full.Devices)...)
	if err != nil {
		return m, l, nil, err
	}
	disk, devices := layers[:len(layers)-1], layers[len(layers)-1]
	file, release, err := k.cfg.Memory.Open(ctx, from)
	if err != nil {
		return m, l, nil, err
	}
	return m, restore.Launch{RunID: durable.NewID(), Chain: disk, Incoming: &machine.Incoming{
		MemoryFile: file.Path, DeviceState: k.layer(devices).Path, Checkpoint: from.ID, Unconfigured: from.Full.Unconfigured,
	}}, release, nil
}

// BeginStandby loads a run that waits, and returns when it can be activated. On
// error nothing of it is left.
func (k *Keeper) BeginStandby(ctx context.Context, m catalog.Machine, l restore.Launch) error {
	run, _, err := k.begin(ctx, launch{Launch: l, machine: m, wait: true})
	if err != nil {
		k.fleet.Discard(l.RunID)
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.beside[l.RunID] = run
	return nil
}

// AdoptStandby takes hold of a standby that an earlier daemon loaded, and
// reports whether it still waits. One that does not is ended.
func (k *Keeper) AdoptStandby(ctx context.Context, runID string) bool {
	adopting, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	run := k.fleet.Adopt(adopting, "", runID)
	if run.Lost() == nil && !run.Ended() && run.Status().GetWaiting() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.beside[runID] = run
		return true
	}
	if err := run.Kill(ctx); err != nil && !errdefs.Is(err, errdefs.WrongState) {
		k.cfg.Log.Warn("end a standby that does not wait", "run", runID, "error", err)
	}
	k.fleet.Discard(runID)
	return false
}

// AwaitStandby returns when a standby's run has ended, whoever's it has become
// by then. One that is not known has ended.
func (k *Keeper) AwaitStandby(ctx context.Context, runID string) error {
	k.mu.Lock()
	run := k.beside[runID]
	k.mu.Unlock()
	if run == nil {
		return nil
	}
	return run.AwaitEnd(ctx)
}

// activate tells a run that waits whose it is, and lets it go.
func (k *Keeper) activate(ctx context.Context, m catalog.Machine, run *fleet.Run) error {
	_, boot, err := k.prepare(ctx, m)
	if err != nil {
		return err
	}
	err = run.Activate(ctx, monitor.Activation{
		MachineID: m.ID, MachineName: m.Name, Guest: guestOf(m),
		Kernel: boot.Kernel, Initramfs: boot.Initramfs, Cmdline: cmdline(m),
	})
	if err != nil {
		return fmt.Errorf("activate run %s for machine %s: %w", run.ID, m.Name, err)
	}
	return nil
}
