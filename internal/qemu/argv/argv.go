//go:build linux

// Package argv makes QEMU's command line of a run, and says which part of it
// a saved state rests on. It looks at no file and starts nothing.
package argv

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/network"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

// The names in a run's folder of the files that QEMU is told.
const (
	Memory  = "memory"
	Console = "console.log"
	PIDFile = Own + "/qemu.pid"
	// Events is the name QEMU takes; the files are EventsIn, a pipe, and EventsOut.
	Events    = "events"
	EventsIn  = "events.in"
	EventsOut = "events.out"
	// Network is in the run's folder of sockets.
	Network = Own + "/net.sock"
	// Own is a folder in either, the only ones where QEMU makes and removes files.
	Own = "own"
)

// The descriptors that the process inherits: sockets that are bound, on which
// it listens itself, so that SO_PEERCRED of a later connection names it.
const (
	QMPFD     = 3
	LinkFD    = 4
	ConsoleFD = 5
	// MemoryFD is the memory file of a run with Incoming, open for reading.
	MemoryFD = 6
)

// diskID is the qdev id of the root disk, DiskPath where QEMU has the device.
const (
	diskID   = "root"
	DiskPath = "/machine/peripheral/" + diskID
)

// consoleOptions are added to the kernel's command line. The two in the middle
// save 0.8 s of boot and two thirds of the time a freeze takes.
const consoleOptions = "console=ttyS0 cryptomgr.notests rcupdate.rcu_expedited=1 panic=-1"

// MemoryFile is the path of the file that the run's guest memory maps.
func MemoryFile(cfg machine.RunConfig) string {
	if cfg.Incoming != nil {
		return cfg.Incoming.MemoryFile
	}
	return filepath.Join(cfg.Dir, Memory)
}

// Arguments is the whole command line, without the binary.
func Arguments(caps host.Capabilities, cfg machine.RunConfig) ([]string, error) {
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
		"-pidfile", path(PIDFile),
		"-accel", cfg.Accelerator,
		"-M", caps.MachineType + host.MachineOptions + ",memory-backend=ram",
		"-cpu", caps.CPU(cfg.Accelerator),
		"-smp", strconv.Itoa(cfg.CPUs),
		"-m", fmt.Sprintf("%dM", cfg.MemoryBytes>>20),
		"-object", memory(caps, cfg),
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d,server=on,wait=off", QMPFD),
		"-mon", "chardev=qmp,mode=control",
		"-chardev", "pipe,id=events,path=" + comma(path(Events)),
		"-mon", "chardev=events,mode=control",
		"-chardev", fmt.Sprintf("socket,id=console,fd=%d,server=on,wait=off,logappend=on,logfile=", ConsoleFD) + comma(path(Console)),
		"-serial", "chardev:console",
		"-blockdev", string(root),
	}
	args = append(args, options(cfg, disk.NodeName(chain[len(chain)-1].ID))...)
	if cfg.Incoming != nil {
		// The saved state has no section about the configuration: Platform is
		// compared instead.
		return append(args, "-incoming", "defer", "-global", "migration.send-configuration=off"), nil
	}
	if cfg.Kernel != "" {
		args = append(args, "-kernel", cfg.Kernel, "-append", strings.TrimSpace(cfg.Cmdline+" "+consoleOptions))
		if cfg.Initramfs != "" {
			args = append(args, "-initrd", cfg.Initramfs)
		}
	}
	return args, nil
}

// memory is the object that maps the guest's memory privately. A QEMU that can
// opens its file read-only, so that it cannot write to what others map.
func memory(caps host.Capabilities, cfg machine.RunConfig) string {
	o := map[string]any{
		"qom-type": "memory-backend-file", "id": "ram", "size": cfg.MemoryBytes,
		"mem-path": MemoryFile(cfg), "share": false, "prealloc": false,
	}
	if OpensReadOnly(caps) {
		o["readonly"], o["rom"] = true, "off"
	}
	return object(o)
}

// OpensReadOnly reports whether QEMU opens the memory file without write
// access by itself: 8.2 has the option for it.
func OpensReadOnly(caps host.Capabilities) bool {
	var major, minor int
	n, err := fmt.Sscanf(caps.Line, "%d.%d", &major, &minor)
	return err == nil && n == 2 && (major > 8 || major == 8 && minor >= 2)
}

// device is one device of the guest, as QEMU takes it in JSON.
type device map[string]any

// devices are at fixed addresses, which are a part of a saved state.
func devices(cfg machine.RunConfig) []device {
	virtio := func(driver, id, addr string, more device) device {
		d := device{"driver": driver, "id": id, "addr": addr, "disable-legacy": "off", "disable-modern": true}
		for k, v := range more {
			d[k] = v
		}
		return d
	}
	all := []device{
		virtio("virtio-blk-pci", diskID, "0x2", device{"num-queues": 1}),
		virtio("virtio-serial-pci", "serial", "0x3", device{"max_ports": 2}),
		{"driver": "virtserialport", "bus": "serial.0", "nr": 1, "chardev": "link", "name": "holdpoint.agent"},
		virtio("virtio-rng-pci", "rng", "0x4", device{"rng": "entropy"}),
		{"driver": "vmgenid", "guid": "auto"},
		{"driver": "pvpanic"},
	}
	if cfg.NIC {
		all = append(all, virtio("virtio-net-pci", "net", "0x5", device{"netdev": "network", "mac": network.GuestMAC, "romfile": ""}))
	}
	return all
}

// options are the devices, the disk's on the block node top, and what is
// behind them.
func options(cfg machine.RunConfig, top string) []string {
	args := []string{
		"-chardev", fmt.Sprintf("socket,id=link,fd=%d,server=on,wait=off", LinkFD),
		"-object", object(map[string]any{"qom-type": "rng-random", "id": "entropy", "filename": "/dev/urandom"}),
	}
	if cfg.NIC {
		// Frames to nobody are lost, and whoever connects next gets the next ones.
		args = append(args, "-netdev", "stream,id=network,server=on,addr.type=unix,addr.path="+comma(filepath.Join(cfg.SocketDir, Network)))
	}
	for _, d := range devices(cfg) {
		if d["id"] == diskID {
			d["drive"] = top
		}
		args = append(args, "-device", object(d))
	}
	return args
}

// Platform is what the guest sees of a run of the config.
func Platform(caps host.Capabilities, cfg machine.RunConfig) machine.Platform {
	p := machine.Platform{
		Hypervisor: caps.Line, MachineType: caps.MachineType, CPU: caps.CPU(cfg.Accelerator),
		Accelerator: cfg.Accelerator, MemoryBytes: cfg.MemoryBytes, CPUs: cfg.CPUs,
		Devices: []string{"machine" + host.MachineOptions}, Network: machine.NetworkNone,
	}
	if cfg.NIC {
		p.Network = machine.NetworkUser
	}
	for _, d := range devices(cfg) {
		p.Devices = append(p.Devices, object(d))
	}
	return p
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
