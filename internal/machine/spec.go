// Package machine says what a machine is: its spec, its lifecycle states, the
// verbs allowed in each, and the Hypervisor that can begin a run of one. It
// starts no process and keeps no state.
package machine

import (
	"regexp"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// Spec is what a machine was asked to be. It belongs to the machine and is
// recorded in each of its checkpoints, in this JSON form.
type Spec struct {
	// MemoryBytes is a multiple of 1 MiB, from MinMemory to MaxMemory.
	MemoryBytes int64 `json:"memory_bytes"`
	// CPUs is from 1 to MaxCPUs.
	CPUs int `json:"cpus"`
	// DiskBytes is the size of the root disk the guest sees.
	DiskBytes int64 `json:"disk_bytes"`
	// DiskFormat is RawDisk, or empty for a chain of qcow2 layers over the image.
	DiskFormat string `json:"disk_format,omitempty"`
	// OnBoot is run by /bin/sh -c in the guest at every boot; empty for none. Where
	// Defaults have a command it is that one, for people, and runs without a shell.
	OnBoot string `json:"on_boot,omitempty"`
	// Defaults are the image's.
	Defaults defaults.Defaults `json:"defaults,omitzero"`
	// Init is who process 1 of the guest is; empty for InitAgent.
	Init string `json:"init,omitempty"`
	// Tmpfs are absolute guest paths that are memory file systems besides
	// /run and /dev/shm; what is in them is in no disk checkpoint.
	Tmpfs []string `json:"tmpfs,omitempty"`
	// Network is a policy.Mode, Allow and AllowHost are the lists of the policy.
	// A machine that was made without a setting, which is "", has no network.
	Network   string   `json:"network"`
	Allow     []string `json:"network_allow,omitempty"`
	AllowHost []int    `json:"network_allow_host,omitempty"`
	// SuspendAfterMillis is how long the machine may be idle before it is
	// suspended; 0 is for ever.
	SuspendAfterMillis int64 `json:"suspend_after_ms,omitempty"`
	// Restart is RestartAlways, or empty for never.
	Restart string `json:"restart,omitempty"`
	// CPULimitMillis is how much CPU time the machine's process may use, in
	// thousandths of a CPU, MemoryLimitBytes how much of the host's memory; 0 is
	// no limit.
	CPULimitMillis   int   `json:"cpu_limit_millis,omitempty"`
	MemoryLimitBytes int64 `json:"memory_limit_bytes,omitempty"`
}

// Policy is where the machine may connect to; nil for one without a network.
func (s Spec) Policy() *policy.Policy {
	if s.Network == "" || s.Network == NetworkNone {
		return nil
	}
	return &policy.Policy{Mode: policy.Mode(s.Network), Allow: s.Allow, AllowHost: s.AllowHost}
}

// Raw reports whether the machine's disk is one raw file of its own.
func (s Spec) Raw() bool { return s.DiskFormat == RawDisk }

// LiveBlocker says why nothing can be kept of the machine while it runs; empty
// where something can.
func (s Spec) LiveBlocker() string {
	if s.Raw() {
		return "its disk is a raw file, which has no layers to switch to"
	}
	return ""
}

// CheckLive refuses (UNSUPPORTED) a verb that keeps something of the machine
// while it runs, where that cannot be.
func (s Spec) CheckLive(verb, name string) error {
	if why := s.LiveBlocker(); why != "" {
		return errdefs.New(errdefs.Unsupported, "%s: of machine %s only stopped disk checkpoints can be taken (%s); use: holdpoint checkpoint create %s --kind disk --mode stopped",
			verb, name, why, name)
	}
	return nil
}

// The limits and defaults of a Spec.
const (
	MinMemory     = 128 << 20
	MaxMemory     = 16 << 30
	DefaultMemory = 512 << 20
	MaxCPUs       = 8
	DefaultCPUs   = 2
	MaxDisk       = 2 << 40

	// RawDisk and QcowDisk are what a disk can be made of; QcowDisk is the default.
	RawDisk  = "raw"
	QcowDisk = "qcow2"

	// MinSuspendAfter is in milliseconds: what is shorter is no idleness.
	MinSuspendAfter = 1000

	// MinCPULimit is in thousandths of a CPU: the kernel counts no less.
	MinCPULimit = 10
	// ProcessMemory is what a machine's process and its monitor need of the host
	// beside the guest's memory, at the least.
	ProcessMemory = 128 << 20

	// RestartAlways: the machine is started by itself whenever it has stopped and
	// no person did that. RestartNo is another word for the empty one.
	RestartAlways = "always"
	RestartNo     = "no"

	// InitAgent is the guest agent, InitSystem the init of the disk, with the agent
	// beside it.
	InitAgent  = "agent"
	InitSystem = "system"

	// NetworkNone means that the agent link is the guest's only way out.
	NetworkNone = "none"
	// NetworkUser is the network of a Platform with a network device.
	NetworkUser = "user"
)

// State is a machine's lifecycle state.
type State string

// The states. Creating is the state of a machine whose first boot has not
// been committed; Unknown means that we cannot tell and will not guess.
const (
	Creating State = "creating"
	Running  State = "running"
	Paused   State = "paused"
	Stopped  State = "stopped"
	// Suspended: no process, but a full checkpoint, its head, to go on from.
	Suspended State = "suspended"
	Unknown   State = "unknown"
)

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// CheckName refuses what is not a legal name for the noun (machine, image,
// checkpoint). "last" is a reference and never a name.
func CheckName(noun, name string) error {
	if name == "last" {
		return errdefs.New(errdefs.Invalid, `name %s: "last" means the %s used last; choose another name`, noun, noun)
	}
	if !namePattern.MatchString(name) {
		return errdefs.New(errdefs.Invalid, "name %s %q: use 1 to 63 of a-z, 0-9 and -, not starting with -", noun, name)
	}
	return nil
}

// hostPattern is a host name in lower case (RFC 1123).
var hostPattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$`)

// CheckHost makes a host name canonical and refuses (INVALID) one that is none.
func CheckHost(host string) (string, error) {
	clean := strings.TrimSuffix(strings.ToLower(host), ".")
	if !hostPattern.MatchString(clean) || len(clean) > 253 {
		return "", errdefs.New(errdefs.Invalid, "host name %q: use letters, digits, - and dots, for example app.localhost", host)
	}
	return clean, nil
}
