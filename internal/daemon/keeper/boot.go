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
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/network/policy"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// CleanExit is a machine's exit after its guest had shut down cleanly.
const CleanExit = "clean shutdown"

// launch is a run that is to begin.
type launch struct {
	restore.Launch
	machine catalog.Machine
	// wait: the run waits to be activated.
	wait bool
	// record is called before anything may be written to the chain's top; nil
	// for nothing to record.
	record func() error
}

// config is all that the monitor of a new run is told.
func (k *Keeper) config(ctx context.Context, l launch) (monitor.Config, string, error) {
	m := l.machine
	img, boot, err := k.prepare(ctx, m)
	if err != nil {
		return monitor.Config{}, "", err
	}
	disk, err := k.open(ctx, img, l.Chain)
	if err != nil {
		return monitor.Config{}, "", err
	}
	group, err := k.group(l)
	if err != nil {
		return monitor.Config{}, "", err
	}
	return monitor.Config{
		Build: k.cfg.Build, Group: group,
		Run: machine.RunConfig{
			RunID: l.RunID, Dir: k.cfg.Home.Run(l.RunID), SocketDir: k.cfg.Home.RunSockets(l.RunID),
			MachineID: m.ID, MachineName: m.Name, MemoryBytes: m.Spec.MemoryBytes, CPUs: m.Spec.CPUs,
			Kernel: boot.Kernel, Initramfs: boot.Initramfs, Cmdline: cmdline(m),
			Disk: disk, Accelerator: boot.Accelerator, Incoming: l.Incoming,
			NIC: m.Spec.Policy() != nil,
		},
		Guest: guestOf(m), Network: outlet(l),
		Wait: l.wait, AsIs: l.AsIs,
	}, boot.Note, nil
}

// open gives the files of a disk, lowest first. A raw one rests on no image.
func (k *Keeper) open(ctx context.Context, img image.Image, chain []catalog.Layer) ([]machine.Layer, error) {
	if len(chain) == 1 && chain[0].Format == catalog.RawFormat {
		return []machine.Layer{k.layer(chain[0])}, nil
	}
	return k.cfg.Chains.Open(ctx, rootOf(img), chain)
}

// RootDisk is the file of an image's root disk, for a copy of it.
func (k *Keeper) RootDisk(buildID string) (string, error) {
	img, err := image.Open(filepath.Join(k.cfg.Home.Images(), buildID))
	return img.Root(), err
}

// outlet is where the run may connect to; nil for a run that is nobody's and is not to
// become anyone's, such as a checkpoint that is only proven.
func outlet(l launch) *policy.Policy {
	if l.machine.ID == "" && !l.wait {
		return nil
	}
	return l.machine.Spec.Policy()
}

func guestOf(m catalog.Machine) monitor.Guest {
	return monitor.Guest{Hostname: m.Name, MachineID: guestMachineID(m.ID), OnBoot: m.Spec.OnBoot, Tmpfs: m.Spec.Tmpfs, Defaults: m.Spec.Defaults}
}

func cmdline(m catalog.Machine) string {
	line := fmt.Sprintf("holdpoint.magic=%s holdpoint.root=/dev/vda", m.LinkMagic)
	if m.Spec.Init == machine.InitSystem {
		// The one network device keeps its name, which the agent has brought up by then.
		line += " holdpoint.init=system net.ifnames=0"
	}
	return line
}

// rootOf is the lowest layer of every machine of an image.
func rootOf(img image.Image) machine.Layer {
	return machine.Layer{ID: "image", Path: img.Root(), Format: "raw"}
}

// prepare checks what the machine boots from and makes what it needs besides.
func (k *Keeper) prepare(ctx context.Context, m catalog.Machine) (image.Image, Boot, error) {
	img, err := image.Open(filepath.Join(k.cfg.Home.Images(), m.ImageBuildID))
	if err != nil {
		return img, Boot{}, err
	}
	boot, err := k.cfg.Booter.PrepareBoot(ctx, img)
	return img, boot, err
}

// Platform is what a run of the machine is made of here.
func (k *Keeper) Platform(ctx context.Context, m catalog.Machine) (machine.Platform, error) {
	img, boot, err := k.prepare(ctx, m)
	if err != nil {
		return machine.Platform{}, err
	}
	return k.cfg.Booter.Platform(ctx, machine.RunConfig{
		MachineID: m.ID, MachineName: m.Name, MemoryBytes: m.Spec.MemoryBytes, CPUs: m.Spec.CPUs,
		Kernel: boot.Kernel, Initramfs: boot.Initramfs, Cmdline: cmdline(m), Accelerator: boot.Accelerator,
		Disk: []machine.Layer{rootOf(img), {ID: "top", Format: "qcow2"}}, NIC: m.Spec.Policy() != nil,
	})
}

// BootedFrom names the kernel and initramfs a machine boots from here: their
// names have their builds in them.
func (k *Keeper) BootedFrom(ctx context.Context, m catalog.Machine) ([]string, error) {
	_, boot, err := k.prepare(ctx, m)
	return []string{m.ImageBuildID, filepath.Base(boot.Initramfs)}, err
}

// ImageInit is who process 1 is in machines of an image, unless they say otherwise.
func (k *Keeper) ImageInit(buildID string) (string, error) {
	img, err := image.Open(filepath.Join(k.cfg.Home.Images(), buildID))
	if err == nil && img.Init == "" {
		return machine.InitAgent, nil
	}
	return img.Init, err
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

// Defaults are what the image says of its machines' programs.
func (k *Keeper) Defaults(buildID string) (defaults.Defaults, error) {
	img, err := image.Open(filepath.Join(k.cfg.Home.Images(), buildID))
	return img.Defaults, err
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
