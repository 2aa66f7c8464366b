//go:build linux

package host

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Acceleration is how guests will run on this host.
type Acceleration struct {
	// Name is "kvm" or "tcg".
	Name string `json:"name"`
	// Reason is why not kvm; empty with kvm. Fix is what a person can do.
	Reason string `json:"reason,omitempty"`
	Fix    string `json:"fix,omitempty"`
	// Fresh is whether KVM was probed just now, so that it is told once.
	Fresh bool `json:"-"`
}

// Accelerator says whether guests can use KVM. /dev/kvm may open and create
// machines in which no kernel gets anywhere (some nested hosts), so the given
// kernel is booted to its first marker, once per boot of the host, QEMU and
// kernel; the answer is remembered. Anything that does not work is TCG, with the
// reason; only a missing QEMU or kernel and an ended ctx are errors.
func (h *Host) Accelerator(ctx context.Context, kernel string) (Acceleration, error) {
	switch h.cfg.Accelerator {
	case "kvm":
		return Acceleration{Name: "kvm"}, nil
	case "tcg":
		return Acceleration{Name: "tcg", Reason: "tcg was asked for"}, nil
	case "":
	default:
		return Acceleration{}, errdefs.New(errdefs.Invalid, "accelerator %q: use kvm or tcg", h.cfg.Accelerator)
	}
	caps, err := h.Probe(ctx)
	if err != nil {
		return Acceleration{}, err
	}
	if a := h.openKVM(); a.Reason != "" {
		return a, nil
	}
	key, err := kvmKey(caps, kernel)
	if err != nil {
		return Acceleration{}, err
	}
	h.probing.Lock()
	defer h.probing.Unlock()
	var a Acceleration
	if h.cached("kvm", key, &a) {
		return a, nil
	}
	a = h.bootKVM(ctx, caps, kernel)
	if err := ctx.Err(); err != nil {
		return Acceleration{}, fmt.Errorf("probe KVM: %w", err)
	}
	if a.Reason != "" {
		h.log.WarnContext(ctx, "KVM does not work here; guests run slower, by emulation", "reason", a.Reason)
	}
	h.remember(ctx, "kvm", key, a)
	a.Fresh = true
	return a, nil
}

// tcgFeatures are added to the CPU model under emulation, where they cost
// nothing and every QEMU since 7.2 has them. Without AVX, Go's memmove copies
// blocks over 2 KiB that are not aligned by REP MOVSB, which TCG carries out
// byte by byte: measured 0.2 GB/s against 1.3 to 2.3 with AVX, in a guest agent
// that does little else than copy. Linux 6.1 hangs early when it finds xsave
// without xsaveopt.
const tcgFeatures = ",xsave=on,xsaveopt=on,avx=on,avx2=on"

// CPU is the value of -cpu under an accelerator: what the host's own processor
// must be able to do differs from what emulation can do anyway.
func (c Capabilities) CPU(accelerator string) string {
	if accelerator == "tcg" {
		return c.CPUModel + tcgFeatures
	}
	return c.CPUModel
}

// openKVM has a reason when the device cannot even be opened.
func (h *Host) openKVM() Acceleration {
	f, err := os.OpenFile(h.cfg.KVMDevice, os.O_RDWR, 0)
	switch {
	case err == nil:
		_ = f.Close() // it was opened to see whether it can be
		return Acceleration{Name: "kvm"}
	case errors.Is(err, os.ErrNotExist):
		return Acceleration{
			Name: "tcg", Reason: h.cfg.KVMDevice + " does not exist",
			Fix: "enable virtualization in the firmware (or nested virtualization), then: sudo modprobe -a kvm_intel kvm_amd",
		}
	case errors.Is(err, os.ErrPermission):
		return Acceleration{
			Name: "tcg", Reason: "no permission to open " + h.cfg.KVMDevice,
			Fix: accessFix(h.cfg.KVMDevice),
		}
	}
	return Acceleration{Name: "tcg", Reason: err.Error(), Fix: "see: sudo dmesg | grep -i kvm"}
}

func kvmKey(caps Capabilities, kernel string) (string, error) {
	boot, err := BootID()
	if err != nil {
		return "", err
	}
	binary, err := fileKey(caps.Binary)
	if err != nil {
		return "", err
	}
	image, err := fileKey(kernel)
	if err != nil {
		return "", errdefs.New(errdefs.NotFound, "probe KVM: %w", err)
	}
	return boot + "|" + binary + "|" + image + "|" + caps.CPUModel, nil
}

// bootKVM boots the kernel with nothing but a serial port.
func (h *Host) bootKVM(ctx context.Context, caps Capabilities, kernel string) Acceleration {
	ctx, cancel := context.WithTimeout(ctx, h.cfg.KVMLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, caps.Binary, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-sandbox", Sandbox, "-accel", "kvm", "-cpu", caps.CPUModel, "-m", "256M",
		"-M", caps.MachineType+MachineOptions,
		"-serial", "stdio", "-kernel", kernel, "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1")
	cmd.WaitDelay = time.Second
	var stderr strings.Builder
	cmd.Stderr = &stderr
	defer Bind(cmd)()
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return noKVM(err.Error())
	}
	came, last := findMarker(out)
	late := ctx.Err() != nil
	cancel()
	_ = cmd.Wait() // killed, or over anyway; what it printed decides
	switch {
	case came:
		return Acceleration{Name: "kvm"}
	case late:
		return noKVM(fmt.Sprintf("a kernel did not come up in %v under KVM (last line: %q)", h.cfg.KVMLimit, last))
	case stderr.Len() > 0:
		return noKVM(LastLine(stderr.String()))
	}
	return noKVM(fmt.Sprintf("a kernel did not come up under KVM (last line: %q)", last))
}

func noKVM(reason string) Acceleration {
	return Acceleration{
		Name: "tcg", Reason: reason,
		Fix: "if this host is itself a virtual machine, ask for full nested virtualization or use bare metal",
	}
}

// findMarker reads until a marker or the end, and returns the last line read.
func findMarker(r io.Reader) (found bool, last string) {
	scan := bufio.NewScanner(io.LimitReader(r, 4<<20))
	for scan.Scan() {
		if line := strings.TrimSpace(scan.Text()); line != "" {
			last = line
		}
		// What a kernel without a root disk says when it has come up.
		for _, m := range []string{"Unable to mount root fs", "Run /init", "No working init found"} {
			if strings.Contains(last, m) {
				return true, last
			}
		}
	}
	return false, last
}

// BootID names this boot of the host.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the host's boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
