//go:build linux

package host

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/holdpoint/holdpoint/internal/dirty"
)

// Check is one thing that doctor looks at.
type Check struct {
	Name string
	// State is "ok", "degraded" (works, with a loss the detail names) or "failed".
	State  string
	Detail string
	// Fix is what a person can do; empty when State is "ok".
	Fix string
}

// Checks looks at QEMU, KVM and what else of the host guests depend on. kernel
// is an image's, to try KVM with; empty when there is none yet.
func (h *Host) Checks(ctx context.Context, kernel string) []Check {
	checks := []Check{h.checkQEMU(ctx), h.checkImg(), h.checkDeviceState(ctx), h.checkKVM(ctx, kernel), h.checkIsolation(ctx, nil)}
	return append(checks, checkPtrace("/proc/sys/kernel/yama/ptrace_scope"), checkTracking(dirty.Probe()))
}

func ok(name, detail string) Check { return Check{Name: name, State: "ok", Detail: detail} }

func degraded(name, detail, fix string) Check {
	return Check{Name: name, State: "degraded", Detail: detail, Fix: fix}
}

func failed(name, detail, fix string) Check {
	return Check{Name: name, State: "failed", Detail: detail, Fix: fix}
}

func (h *Host) checkQEMU(ctx context.Context) Check {
	caps, err := h.Probe(ctx)
	if err != nil {
		return failed("qemu", err.Error(), PackageAdvice)
	}
	model, _, _ := strings.Cut(caps.CPUModel, ",")
	return ok("qemu", fmt.Sprintf("%s %s, machine %s, CPU %s", caps.Binary, caps.Version, caps.MachineType, model))
}

func (h *Host) checkImg() Check {
	path, err := exec.LookPath(h.cfg.ImgBinary)
	if err != nil {
		return failed("qemu-img", err.Error(), "install the package qemu-utils (apt install qemu-utils)")
	}
	return ok("qemu-img", path)
}

func (h *Host) checkDeviceState(ctx context.Context) Check {
	const name = "device-state"
	caps, err := h.Probe(ctx)
	switch {
	case err != nil:
		return failed(name, "there is no QEMU to ask", PackageAdvice)
	case !caps.DeviceState:
		return degraded(name, "this QEMU has no xen-save-devices-state; only disk checkpoints work",
			"use a QEMU for x86-64 from a distribution")
	}
	return ok(name, "QEMU can save devices without memory (xen-save-devices-state)")
}

func (h *Host) checkKVM(ctx context.Context, kernel string) Check {
	const name = "kvm"
	a := h.openKVM()
	if a.Reason == "" && kernel == "" && h.cfg.Accelerator == "" {
		return ok(name, h.cfg.KVMDevice+" opens; whether a guest boots is tried with the first image")
	}
	if a.Reason == "" || h.cfg.Accelerator != "" {
		var err error
		if a, err = h.Accelerator(ctx, kernel); err != nil {
			return failed(name, err.Error(), "see the checks above")
		}
	}
	if a.Name == "kvm" {
		return ok(name, "guests run on KVM")
	}
	fix := a.Fix
	if fix == "" {
		fix = "unset HOLDPOINT_ACCEL"
	}
	return degraded(name, "guests run by emulation (TCG), several times slower: "+a.Reason, fix)
}

// checkPtrace looks at Yama, which may forbid looking into QEMU's memory from
// outside, as full checkpoints do.
func checkPtrace(path string) Check {
	const name = "ptrace-scope"
	b, err := os.ReadFile(path)
	if err != nil {
		return ok(name, "the kernel does not restrict ptrace")
	}
	scope := strings.TrimSpace(string(b))
	if scope == "0" || scope == "1" || os.Getuid() == 0 && scope == "2" {
		return ok(name, "kernel.yama.ptrace_scope is "+scope)
	}
	fix := "sudo sysctl kernel.yama.ptrace_scope=1"
	if scope == "3" {
		fix = "set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot (3 cannot be changed while the host runs)"
	}
	return degraded(name, "kernel.yama.ptrace_scope is "+scope+", which forbids full checkpoints; disk checkpoints work", fix)
}

// checkTracking says how full checkpoints find the pages that a guest wrote.
func checkTracking(support []dirty.Support) Check {
	const name = "memory-tracking"
	const fix = "boot a Linux kernel 6.7 or newer with CONFIG_USERFAULTFD"
	var missing []string
	for _, s := range support {
		if !s.Available {
			missing = append(missing, s.Reason)
		}
	}
	why := strings.Join(missing, "; ")
	switch dirty.Best(support) {
	case dirty.Userfaultfd:
		return ok(name, "full checkpoints copy what changed while the guest runs (userfaultfd)")
	case dirty.SoftDirty:
		return degraded(name, "full checkpoints copy what changed while the guest is paused (soft-dirty): "+why, fix)
	}
	return degraded(name, "full checkpoints copy all that a guest has written since it began, while it is paused (untracked): "+why, fix)
}
