package machine_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

func platform() machine.Platform {
	return machine.Platform{
		Hypervisor: "7.2", MachineType: "pc-q35-7.2", CPU: "qemu64-v1,aes=on", Accelerator: "tcg",
		MemoryBytes: 512 << 20, CPUs: 2, Devices: []string{"blk", "rng"}, Network: machine.NetworkNone,
	}
}

// TestCheckNamesWhatDiffers: whatever differs, in a checkpoint taken here and
// continued there or the other way round, is refused in one line that names
// it, both values and the way out.
func TestCheckNamesWhatDiffers(t *testing.T) {
	const what, restoreDisk = "checkpoint c1", "holdpoint restore web c1 --disk"
	if err := platform().Check(platform(), what, restoreDisk); err != nil {
		t.Errorf("the same: %v", err)
	}
	tests := map[string]struct {
		change            func(*machine.Platform)
		names, one, other string
	}{
		"Accelerator": {func(p *machine.Platform) { p.Accelerator = "kvm" }, "accelerator", "tcg", "kvm"},
		// With a line the machine type changes, too; the line says more.
		"Hypervisor":  {func(p *machine.Platform) { p.Hypervisor, p.MachineType = "10.0", "pc-q35-10.0" }, "QEMU line", "7.2", "10.0"},
		"MachineType": {func(p *machine.Platform) { p.MachineType = "pc-q35-7.1" }, "machine type", "pc-q35-7.2", "pc-q35-7.1"},
		"CPU":         {func(p *machine.Platform) { p.CPU = "qemu64-v1,aes=off" }, "CPU model", "qemu64-v1,aes=on", "qemu64-v1,aes=off"},
		"MemoryBytes": {func(p *machine.Platform) { p.MemoryBytes = 1 << 30 }, "memory", "512 MiB", "1024 MiB"},
		"CPUs":        {func(p *machine.Platform) { p.CPUs = 4 }, "number of CPUs", "2", "4"},
		"Devices":     {func(p *machine.Platform) { p.Devices = p.Devices[:1] }, "devices", "blk rng", "blk"},
		"Network":     {func(p *machine.Platform) { p.Network = "other" }, "network", machine.NetworkNone, "other"},
	}
	for name, test := range tests {
		differs := platform()
		test.change(&differs)
		for _, way := range []struct {
			then, here machine.Platform
			says       string
		}{
			{platform(), differs, "its " + test.names + " is " + test.one + ", here it is " + test.other + ";"},
			{differs, platform(), "its " + test.names + " is " + test.other + ", here it is " + test.one + ";"},
		} {
			err := way.then.Check(way.here, what, restoreDisk)
			if !errdefs.Is(err, errdefs.Incompatible) {
				t.Errorf("%s: %v is %s", name, err, errdefs.KindOf(err))
				continue
			}
			text := err.Error()
			if !strings.HasPrefix(text, what+" ") || !strings.Contains(text, way.says) || !strings.HasSuffix(text, restoreDisk) || strings.Contains(text, "\n") {
				t.Errorf("%s: %q does not say %q", name, text, way.says)
			}
		}
	}
	fields := reflect.TypeFor[machine.Platform]()
	for i := range fields.NumField() {
		if _, ok := tests[fields.Field(i).Name]; !ok {
			t.Errorf("no test of the field %s", fields.Field(i).Name)
		}
	}
}
