//go:build linux

package keeper

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// config is all that the monitor of a new run is told.
func (k *Keeper) config(ctx context.Context, m catalog.Machine, runID string, chain []catalog.Layer) (monitor.Config, string, error) {
	img, err := image.Open(filepath.Join(k.cfg.Home.Images(), m.ImageBuildID))
	if err != nil {
		return monitor.Config{}, "", err
	}
	boot, err := k.cfg.Booter.PrepareBoot(ctx, img)
	if err != nil {
		return monitor.Config{}, "", err
	}
	disk := []machine.Layer{{ID: "image", Path: img.Root(), Format: "raw"}}
	for _, layer := range chain {
		disk = append(disk, k.layer(layer))
	}
	return monitor.Config{
		Build: k.cfg.Build,
		Run: machine.RunConfig{
			RunID: runID, Dir: k.cfg.Home.Run(runID), SocketDir: k.cfg.Home.RunSockets(runID),
			MachineID: m.ID, MachineName: m.Name, MemoryBytes: m.Spec.MemoryBytes, CPUs: m.Spec.CPUs,
			Kernel: boot.Kernel, Initramfs: boot.Initramfs,
			Cmdline: fmt.Sprintf("holdpoint.magic=%s holdpoint.root=/dev/vda", m.LinkMagic),
			Disk:    disk, Accelerator: boot.Accelerator,
		},
		Guest: monitor.Guest{
			Hostname: m.Name, MachineID: guestMachineID(m.ID), OnBoot: m.Spec.OnBoot, Tmpfs: m.Spec.Tmpfs,
		},
	}, boot.Note, nil
}

// CheckImage refuses an image that cannot be booted, as a boot would.
func (k *Keeper) CheckImage(ctx context.Context, buildID string) error {
	img, err := image.Open(filepath.Join(k.cfg.Home.Images(), buildID))
	if err != nil {
		return err
	}
	_, err = k.cfg.Booter.PrepareBoot(ctx, img)
	return err
}

func (k *Keeper) layer(l catalog.Layer) machine.Layer {
	return machine.Layer{ID: l.ID, Path: filepath.Join(k.cfg.Home.Dir(), filepath.FromSlash(l.Path)), Format: l.Format}
}

// guestMachineID is the guest's /etc/machine-id, made from the machine's id as
// machine-id(5) advises: a digest, so that it tells nothing else.
func guestMachineID(machineID string) string {
	sum := sha256.Sum256([]byte("holdpoint machine-id " + machineID))
	return hex.EncodeToString(sum[:16])
}
