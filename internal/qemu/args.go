//go:build linux

package qemu

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

// The descriptors that the process inherits: sockets that are bound, on which
// it listens itself, so that SO_PEERCRED of a later connection names it.
const (
	qmpFD  = 3
	linkFD = 4
)

// diskID is the qdev id of the root disk; its frontend is diskPath.
const (
	diskID   = "root"
	diskPath = "/machine/peripheral/root/virtio-backend"
)

// consoleOptions are added to the kernel's command line. The two in the middle
// save 0.8 s of boot and two thirds of the time a freeze takes.
const consoleOptions = "console=ttyS0 cryptomgr.notests rcupdate.rcu_expedited=1 panic=-1"

// arguments is the whole command line, without the binary.
func arguments(caps host.Capabilities, cfg machine.RunConfig) ([]string, error) {
	chain := make([]disk.Layer, len(cfg.Disk))
	for i, l := range cfg.Disk {
		chain[i] = disk.Layer(l)
	}
	root, err := disk.ChainJSON(chain, true)
	if err != nil {
		return nil, err
	}
	path := func(name string) string { return filepath.Join(cfg.Dir, name) }
	args := []string{
		"-name", "guest=holdpoint-" + comma(cfg.MachineName),
		"-nodefaults", "-no-user-config", "-S", "-display", "none",
		"-action", "reboot=shutdown,shutdown=poweroff,panic=shutdown",
		"-sandbox", host.Sandbox,
		"-pidfile", path(pidFile),
		"-accel", cfg.Accelerator,
		"-M", caps.MachineType + host.MachineOptions + ",memory-backend=ram",
		"-cpu", caps.CPU(cfg.Accelerator),
		"-smp", strconv.Itoa(cfg.CPUs),
		"-m", fmt.Sprintf("%dM", cfg.MemoryBytes>>20),
		"-object", object(map[string]any{
			"qom-type": "memory-backend-file", "id": "ram", "size": cfg.MemoryBytes,
			"mem-path": path(memoryFile), "share": false, "prealloc": false,
		}),
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d,server=on,wait=off", qmpFD),
		"-mon", "chardev=qmp,mode=control",
		"-chardev", "pipe,id=events,path=" + comma(path(eventsPipe)),
		"-mon", "chardev=events,mode=control",
		"-chardev", "file,id=console,append=on,path=" + comma(path(consoleFile)),
		"-serial", "chardev:console",
		"-blockdev", string(root),
	}
	args = append(args, devices(disk.NodeName(chain[len(chain)-1].ID))...)
	if cfg.Kernel != "" {
		args = append(args, "-kernel", cfg.Kernel, "-append", strings.TrimSpace(cfg.Cmdline+" "+consoleOptions))
		if cfg.Initramfs != "" {
			args = append(args, "-initrd", cfg.Initramfs)
		}
	}
	return args, nil
}

// devices are at fixed addresses, which are a part of a saved device state.
func devices(top string) []string {
	virtio := func(driver, id, addr string, more map[string]any) string {
		d := map[string]any{"driver": driver, "id": id, "addr": addr, "disable-legacy": "off", "disable-modern": true}
		for k, v := range more {
			d[k] = v
		}
		return object(d)
	}
	return []string{
		"-device", virtio("virtio-blk-pci", diskID, "0x2", map[string]any{"drive": top, "num-queues": 1}),
		"-device", virtio("virtio-serial-pci", "serial", "0x3", map[string]any{"max_ports": 2}),
		"-chardev", fmt.Sprintf("socket,id=link,fd=%d,server=on,wait=off", linkFD),
		"-device", object(map[string]any{
			"driver": "virtserialport", "bus": "serial.0", "nr": 1,
			"chardev": "link", "name": "holdpoint.agent",
		}),
		"-object", object(map[string]any{"qom-type": "rng-random", "id": "entropy", "filename": "/dev/urandom"}),
		"-device", virtio("virtio-rng-pci", "rng", "0x4", map[string]any{"rng": "entropy"}),
		"-device", object(map[string]any{"driver": "vmgenid", "guid": "auto"}),
		"-device", object(map[string]any{"driver": "pvpanic"}),
	}
}

// object encodes an option that QEMU takes as JSON, where paths need no escape.
func object(m map[string]any) string {
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings, numbers and booleans always encode
	}
	return string(b)
}

// comma escapes a value for QEMU's key=value options.
func comma(s string) string { return strings.ReplaceAll(s, ",", ",,") }
