//go:build linux

// Package qemuhost is the real host: disks are made by qemu-img, images from
// packages, and machines boot by what QEMU can do here.
package qemuhost

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/cgroup"
	"github.com/holdpoint/holdpoint/internal/daemon"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/image/adopt"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qemu/merge"
)

// Config is what a Host needs.
type Config struct {
	Home  *home.Home
	Files *durable.FS
	// Accelerator is "kvm" or "tcg" to skip the probe; empty to probe.
	Accelerator string
	Log         *slog.Logger
}

// preparedFor is how long what a boot needs is not looked for again: that takes
// 20 ms, most of it for the digest of our own agent and for opening /dev/kvm.
const preparedFor = 10 * time.Minute

// Host implements daemon.Host. It has no end.
type Host struct {
	*disk.Disk
	*merge.Merger
	cfg    Config
	qemu   *host.Host
	groups *cgroup.Tree

	mu sync.Mutex
	// prepared are the boots of images by build id, since is when each was.
	prepared map[string]keeper.Boot
	since    map[string]time.Time
}

// New returns a Host.
func New(cfg Config) *Host {
	q := newHost(cfg)
	return &Host{
		groups: cgroup.New(),
		Disk:   disk.New(disk.Config{FS: cfg.Files}), Merger: merge.New(merge.Config{Host: q, Files: cfg.Files}),
		cfg: cfg, qemu: q, prepared: map[string]keeper.Boot{}, since: map[string]time.Time{},
	}
}

func newHost(cfg Config) *host.Host {
	return host.New(host.Config{CacheDir: cfg.Home.Cache(), Accelerator: cfg.Accelerator, FS: cfg.Files, Logger: cfg.Log})
}

// Hypervisor is the QEMU of this host, and its version; empty when it is missing.
func Hypervisor(ctx context.Context, cfg Config) (q *qemu.QEMU, version string) {
	h := newHost(cfg)
	// A launch tells what is wrong with QEMU; here it is only asked for its version.
	caps, _ := h.Probe(ctx)
	return qemu.New(qemu.Config{Host: h, Logger: cfg.Log}), caps.Version
}

// PrepareBoot checks the image, makes its initramfs with this build's agent,
// and finds out under which accelerator its kernel boots here.
func (h *Host) PrepareBoot(ctx context.Context, img image.Image) (keeper.Boot, error) {
	if err := img.Check(ctx); err != nil {
		return keeper.Boot{}, err
	}
	if boot, ok := h.known(img.BuildID); ok {
		return boot, nil
	}
	initramfs, err := img.BootInitramfs(ctx, h.cfg.Home.Cache())
	if err != nil {
		return keeper.Boot{}, err
	}
	accel, err := h.qemu.Accelerator(ctx, img.Kernel())
	if err != nil {
		return keeper.Boot{}, err
	}
	boot := keeper.Boot{Kernel: img.Kernel(), Initramfs: initramfs, Accelerator: accel.Name}
	if accel.Fresh && accel.Reason != "" {
		boot.Note = fmt.Sprintf("machines run without KVM here, many times slower: %s", accel.Reason)
		if accel.Fix != "" {
			boot.Note += "; " + accel.Fix
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.prepared[img.BuildID], h.since[img.BuildID] = boot, time.Now()
	return boot, nil
}

// known is what was prepared a while ago, as long as it is still there.
func (h *Host) known(buildID string) (keeper.Boot, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	boot, ok := h.prepared[buildID]
	if !ok || time.Since(h.since[buildID]) > preparedFor {
		return boot, false
	}
	_, err := os.Lstat(boot.Initramfs)
	boot.Note = "" // it was said
	return boot, err == nil
}

// Platform is what QEMU here makes of the config.
func (h *Host) Platform(ctx context.Context, cfg machine.RunConfig) (machine.Platform, error) {
	return qemu.New(qemu.Config{Host: h.qemu, Logger: h.cfg.Log}).Platform(ctx, cfg)
}

// BuildImage builds an image from packages.
func (h *Host) BuildImage(ctx context.Context, cfg image.BuildConfig, progress func(image.Progress)) (image.Image, error) {
	return image.Build(ctx, cfg, progress)
}

// ImportImage makes an image of what somebody else made.
func (h *Host) ImportImage(ctx context.Context, cfg adopt.Config, progress func(image.Progress)) (image.Image, []string, error) {
	return adopt.Import(ctx, cfg, progress)
}

// Checks says what of the host works.
func (h *Host) Checks(ctx context.Context) []daemon.Check {
	var checks []daemon.Check
	for _, r := range image.Requirements(ctx) {
		check := daemon.Check{Name: r.Name, State: "ok", Detail: r.Detail, Fix: r.Fix}
		if !r.OK {
			check.State = "degraded"
		}
		checks = append(checks, check)
	}
	for _, c := range h.qemu.Checks(ctx, h.kernel()) {
		checks = append(checks, daemon.Check{Name: c.Name, State: string(c.State), Detail: c.Detail, Fix: c.Fix})
	}
	return append(checks, limitsCheck(h.groups.Check()))
}

// limitsCheck is what there is to say of limits.
func limitsCheck(err error) daemon.Check {
	if err != nil {
		return daemon.Check{Name: "limits", State: "degraded", Detail: strings.TrimSuffix(err.Error(), "; "+cgroup.Advice), Fix: cgroup.Advice}
	}
	return daemon.Check{Name: "limits", State: "ok", Detail: "machines can be held to limits of CPU and memory"}
}

// Groups holds runs to limits.
func (h *Host) Groups() *cgroup.Tree { return h.groups }

// kernel is that of some image, for the probe of KVM; empty when there is none.
func (h *Host) kernel() string {
	found, err := filepath.Glob(filepath.Join(h.cfg.Home.Images(), "*", "kernel"))
	if err != nil || len(found) == 0 {
		return ""
	}
	return found[0]
}
