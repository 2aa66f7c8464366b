package machine

import (
	"path"
	"slices"
	"strings"
	"unicode"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// Complete fills in the defaults of zero fields, makes paths canonical, and
// refuses (INVALID) what no machine can be. DiskBytes may stay 0: it is the
// image's then.
func (s *Spec) Complete() error {
	s.fillIn()
	switch {
	case s.Restart != "" && s.Restart != RestartAlways:
		return errdefs.New(errdefs.Invalid, "restart %q: it is always or no", s.Restart)
	case s.CPULimitMillis != 0 && s.CPULimitMillis < MinCPULimit:
		return errdefs.New(errdefs.Invalid, "cpu-limit of %d thousandths of a CPU: give %d or more, or 0 for none", s.CPULimitMillis, MinCPULimit)
	case s.MemoryLimitBytes != 0 && s.MemoryLimitBytes < s.MemoryBytes+ProcessMemory:
		return errdefs.New(errdefs.Invalid, "memory-limit of %d MiB: the machine would be killed; its memory and its process need %d MiB", s.MemoryLimitBytes>>20, (s.MemoryBytes+ProcessMemory)>>20)
	case s.MemoryBytes%(1<<20) != 0:
		return errdefs.New(errdefs.Invalid, "memory of %d bytes: give whole MiB, such as 512M", s.MemoryBytes)
	case s.MemoryBytes < MinMemory || s.MemoryBytes > MaxMemory:
		return errdefs.New(errdefs.Invalid, "memory of %d MiB: a machine has %d MiB to %d MiB", s.MemoryBytes>>20, MinMemory>>20, MaxMemory>>20)
	case s.CPUs < 1 || s.CPUs > MaxCPUs:
		return errdefs.New(errdefs.Invalid, "cpus %d: a machine has 1 to %d", s.CPUs, MaxCPUs)
	case s.DiskBytes < 0 || s.DiskBytes > MaxDisk:
		return errdefs.New(errdefs.Invalid, "disk of %d bytes: a disk has at most %d GiB", s.DiskBytes, int64(MaxDisk)>>30)
	case s.DiskBytes%(1<<20) != 0:
		return errdefs.New(errdefs.Invalid, "disk of %d bytes: give whole MiB", s.DiskBytes)
	case s.DiskFormat != "" && !s.Raw():
		return errdefs.New(errdefs.Invalid, "disk format %q: use qcow2 or raw", s.DiskFormat)
	case s.Raw() && s.SuspendAfterMillis != 0:
		return errdefs.New(errdefs.Unsupported, "suspend-after: a machine with a raw disk cannot be suspended (%s); leave it out, or take a qcow2 disk", s.LiveBlocker())
	case s.SuspendAfterMillis != 0 && s.SuspendAfterMillis < MinSuspendAfter:
		return errdefs.New(errdefs.Invalid, "suspend-after of %d ms: give 1s or more, or 0 for never", s.SuspendAfterMillis)
	case s.Init != "" && s.Init != InitAgent && s.Init != InitSystem:
		return errdefs.New(errdefs.Invalid, "init %q: use %s or %s", s.Init, InitAgent, InitSystem)
	case len(s.Tmpfs) > maxTmpfs:
		return errdefs.New(errdefs.Invalid, "tmpfs: %d paths, at most %d", len(s.Tmpfs), maxTmpfs)
	case len(s.OnBoot) > maxOnBoot:
		return errdefs.New(errdefs.Invalid, "on-boot command of %d bytes: at most %d; put it into a file in the guest", len(s.OnBoot), maxOnBoot)
	}
	network := policy.Policy{Mode: policy.Mode(s.Network), Allow: s.Allow, AllowHost: s.AllowHost}
	if _, err := network.Compile(); err != nil {
		return err
	}
	for i, p := range s.Tmpfs {
		s.Tmpfs[i] = path.Clean(p)
		if !strings.HasPrefix(s.Tmpfs[i], "/") || s.Tmpfs[i] == "/" || strings.ContainsFunc(p, unicode.IsControl) {
			return errdefs.New(errdefs.Invalid, "tmpfs %q: give an absolute path below /", p)
		}
		for _, taken := range []string{"/proc", "/sys", "/dev", "/run"} {
			if s.Tmpfs[i] == taken || strings.HasPrefix(s.Tmpfs[i], taken+"/") {
				return errdefs.New(errdefs.Invalid, "tmpfs %q: %s is the guest's own already", p, taken)
			}
		}
	}
	return nil
}

// fillIn gives zero fields their defaults, and those that say in words what zero
// says become zero.
func (s *Spec) fillIn() {
	if s.MemoryBytes == 0 {
		s.MemoryBytes = DefaultMemory
	}
	if s.CPUs == 0 {
		s.CPUs = DefaultCPUs
	}
	if s.Network == "" {
		s.Network = string(policy.Internet)
	}
	if s.DiskFormat == QcowDisk {
		s.DiskFormat = ""
	}
	if s.Restart == RestartNo {
		s.Restart = ""
	}
}

// maxOnBoot bounds an on-boot command, in bytes, maxTmpfs the paths of a spec.
const (
	maxOnBoot = 64 << 10
	maxTmpfs  = 64
)

// Allow refuses (WRONG_STATE) a verb on a machine whose state is none of the
// allowed ones. The error names verb, machine, state, and what to do.
func Allow(verb, name string, state State, allowed ...State) error {
	if slices.Contains(allowed, state) {
		return nil
	}
	if state == goal(verb) {
		return errdefs.New(errdefs.WrongState, "%s: machine %s is %s already", verb, name, state)
	}
	return errdefs.New(errdefs.WrongState, "%s: machine %s is %s; %s", verb, name, state, remedy(verb, name, state))
}

// goal is the state that a verb brings a machine to; "" where it is none.
func goal(verb string) State {
	switch verb {
	case "start", "resume":
		return Running
	case "stop":
		return Stopped
	case "pause":
		return Paused
	case "suspend":
		return Suspended
	}
	return ""
}

// remedy is what to do about a state that a verb cannot begin in.
func remedy(verb, name string, state State) string {
	switch state {
	case Stopped:
		return "run holdpoint start " + name
	case Paused, Suspended:
		resume := "run holdpoint resume " + name
		switch {
		case verb == "stop" && state == Paused:
			resume += " first, or end it as a power cut would with holdpoint stop --force " + name
		case verb == "stop":
			resume += " first, or remove it with holdpoint rm --force " + name
		}
		return resume
	case Creating:
		return "wait for it: holdpoint operation ls"
	case Unknown:
		return "end it with holdpoint stop --force " + name + ", or look into holdpoint inspect " + name
	}
	return "see holdpoint inspect " + name
}
