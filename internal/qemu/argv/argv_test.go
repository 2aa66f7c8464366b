//go:build linux

package argv

import (
	"slices"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

func config() machine.RunConfig {
	return machine.RunConfig{
		Dir: "/run/a", MachineName: "web", MemoryBytes: 512 << 20, CPUs: 2, Accelerator: "tcg",
		Kernel: "/k", Initramfs: "/i", Cmdline: "x",
		Disk: []machine.Layer{{ID: "base", Path: "/base", Format: "raw"}, {ID: "top", Path: "/top", Format: "qcow2"}},
	}
}

func arguments(t *testing.T, line string, cfg machine.RunConfig) string {
	t.Helper()
	args, err := Arguments(host.Capabilities{Line: line, MachineType: "pc-q35-" + line}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(args, "\n")
}

func TestContinuedRunsHaveNoKernel(t *testing.T) {
	boot := arguments(t, "7.2", config())
	cfg := config()
	cfg.Incoming = &machine.Incoming{MemoryFile: "/cache/m", DeviceState: "/d"}
	next := arguments(t, "7.2", cfg)
	for _, option := range []string{"-kernel\n/k", "-initrd\n/i", "-append\nx ", `"mem-path":"/run/a/memory"`} {
		if !strings.Contains(boot, option) || strings.Contains(next, option) {
			t.Errorf("%q belongs to a boot alone", option)
		}
	}
	for _, option := range []string{"-incoming\ndefer", `"mem-path":"/cache/m"`, "send-configuration=off"} {
		if strings.Contains(boot, option) || !strings.Contains(next, option) {
			t.Errorf("%q belongs to a run that continues alone", option)
		}
	}
	if strings.Contains(boot+next, `"share":true`) {
		t.Error("guest memory is shared")
	}
}

func TestMemoryIsReadOnlyWhereItCanBe(t *testing.T) {
	for line, want := range map[string]bool{"7.2": false, "8.1": false, "8.2": true, "9.0": true, "10.0": true} {
		got := strings.Contains(arguments(t, line, config()), `"readonly":true,"rom":"off"`)
		if got != want || OpensReadOnly(host.Capabilities{Line: line}) != want {
			t.Errorf("QEMU %s opens the memory file read-only: %v, want %v", line, got, want)
		}
	}
}

// What runs differ in without the guest seeing it is no part of the platform;
// each device is.
func TestPlatform(t *testing.T) {
	caps := host.Capabilities{Line: "7.2", MachineType: "pc-q35-7.2", CPUModel: "m"}
	a := config()
	b := config()
	b.Dir, b.Disk[1].ID, b.MachineName, b.Kernel = "/run/b", "other", "db", "/other"
	b.Incoming = &machine.Incoming{MemoryFile: "/m"}
	x, y := Platform(caps, a), Platform(caps, b)
	if err := x.Check(y, "checkpoint", "restore"); err != nil {
		t.Error(err)
	}
	line := arguments(t, "7.2", a)
	for _, driver := range []string{"virtio-blk-pci", "virtio-serial-pci", "virtserialport", "virtio-rng-pci", "vmgenid", "pvpanic"} {
		in := slices.ContainsFunc(x.Devices, func(d string) bool { return strings.Contains(d, `"`+driver+`"`) })
		if !in || !strings.Contains(line, `"driver":"`+driver+`"`) {
			t.Errorf("device %s is missing", driver)
		}
	}
	if x.Network != machine.NetworkNone || strings.Contains(line, "net") {
		t.Errorf("a machine without a network has one: %s", x.Network)
	}
	b.NIC, b.SocketDir = true, "/run/b,c"
	y = Platform(caps, b)
	if err := x.Check(y, "checkpoint", "restore"); err == nil || y.Network != machine.NetworkUser {
		t.Error("a network device makes no difference")
	}
	b.Incoming = nil
	if with := arguments(t, "7.2", b); !strings.Contains(with, "-netdev\nstream,id=network,server=on,addr.type=unix,addr.path=/run/b,,c/own/net.sock") || !strings.Contains(with, `"driver":"virtio-net-pci"`) {
		t.Error(with)
	}
	if strings.Count(line, "-device\n")+1 != len(x.Devices) {
		t.Errorf("platform has %d devices: %v", len(x.Devices), x.Devices)
	}
}
