package machine

import (
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Platform is what a full checkpoint rests on besides its bytes, in this JSON
// form in its record: a run made of anything else cannot continue from it.
type Platform struct {
	// Hypervisor is the QEMU line, "7.2": a point update keeps checkpoints.
	Hypervisor string `json:"hypervisor"`
	// MachineType is versioned, such as "pc-q35-7.2".
	MachineType string `json:"machine_type"`
	// CPU is the CPU model with its features.
	CPU         string `json:"cpu"`
	Accelerator string `json:"accelerator"`
	MemoryBytes int64  `json:"memory_bytes"`
	CPUs        int    `json:"cpus"`
	// Devices are the devices with their addresses and options, in order.
	Devices []string `json:"devices"`
	Network string   `json:"network"`
}

// Check refuses (INCOMPATIBLE) a checkpoint taken on p to be continued on
// here. The error names the first field that differs and what can be done;
// what names the checkpoint, restoreDisk is the command for its disk alone.
func (p Platform) Check(here Platform, what, restoreDisk string) error {
	type field struct{ name, then, now string }
	fields := []field{
		{"accelerator", p.Accelerator, here.Accelerator},
		{"QEMU line", p.Hypervisor, here.Hypervisor},
		{"machine type", p.MachineType, here.MachineType},
		{"CPU model", p.CPU, here.CPU},
		{"memory", mib(p.MemoryBytes), mib(here.MemoryBytes)},
		{"number of CPUs", count(p.CPUs), count(here.CPUs)},
		{"network", p.Network, here.Network},
		{"devices", strings.Join(p.Devices, " "), strings.Join(here.Devices, " ")},
	}
	for _, f := range fields {
		if f.then != f.now {
			return errdefs.New(errdefs.Incompatible,
				"%s cannot be continued here: its %s is %s, here it is %s; its disk alone, as after a power cut: %s",
				what, f.name, f.then, f.now, restoreDisk)
		}
	}
	return nil
}

func mib(bytes int64) string { return strconv.FormatInt(bytes>>20, 10) + " MiB" }

func count(n int) string { return strconv.Itoa(n) }
