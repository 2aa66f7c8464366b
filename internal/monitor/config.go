//go:build linux

package monitor

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/defaults"
	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// The versions this build speaks and writes. A file or a monitor with a
// higher one is refused (INCOMPATIBLE).
const (
	ProtocolVersion = 1
	configVersion   = 1
	recordVersion   = 1
)

// The files of a run's folder, and of its socket folder.
const (
	ConfigFile = "config.json"
	recordFile = "record.json"
	lockFile   = "monitor.lock"
	logFile    = "monitor.log"
	socketFile = "monitor.sock"
)

// Config is config.json in the run's folder: what the starter decided before
// the monitor was spawned. It never changes; what changes is in the Record.
type Config struct {
	Version int `json:"version"`
	// Run is the first run. A reboot of the guest begins the next ones with
	// the same settings but Incoming, a new run id and the chain of the Record:
	// kernel, initramfs and command line are those of a reboot then. The magic
	// in Cmdline is the one that the guest of the first run knows, so for one
	// with Incoming that of the boot which the checkpoint goes back to.
	Run machine.RunConfig `json:"run"`
	// Guest is what a freshly booted guest is told.
	Guest Guest `json:"guest"`
	// Network is where the machine may connect to; nil leaves its network device,
	// if it has one, unconnected.
	Network *policy.Policy `json:"network,omitempty"`
	// Wait makes the run wait for Activate, which says whose it is: one with
	// Incoming is loaded and its vCPUs are not let go (a standby), one that
	// boots is linked and not configured. Machine, Guest, Kernel, Initramfs and
	// the command line of reboots may be missing until then.
	Wait bool `json:"wait,omitempty"`
	// AsIs takes a guest that continues as it comes: it is ready once it
	// answers, and is told neither name nor time, nor given entropy.
	AsIs bool `json:"as_is,omitempty"`
	// Group, not empty, is the folder of the group of processes that the monitor
	// and its runs are in; it exists.
	Group string `json:"group,omitempty"`
	// Build is that of the starter, for people.
	Build string `json:"build"`
}

// Guest is what a freshly booted guest is told (Configure of the agent).
type Guest struct {
	Hostname string `json:"hostname"`
	// MachineID is 32 lower-case hexadecimal digits.
	MachineID string   `json:"machine_id"`
	OnBoot    string   `json:"on_boot,omitempty"`
	Tmpfs     []string `json:"tmpfs,omitempty"`
	// Defaults say how OnBoot runs, or what else does.
	Defaults defaults.Defaults `json:"defaults,omitzero"`
}

// Told is the guest's part of it, without the clock and entropy.
func (g Guest) Told() *agentv1.ConfigureRequest {
	m := &agentv1.ConfigureRequest{Hostname: g.Hostname, MachineId: g.MachineID, OnBoot: g.OnBoot, Tmpfs: g.Tmpfs}
	if !g.Defaults.IsZero() {
		m.OnBoot, m.OnBootCommand = "", g.Defaults.OnBoot(g.OnBoot)
	}
	return m
}

// Activation says whose a waiting run is, and what reboots of its guest boot.
type Activation struct {
	MachineID   string `json:"machine_id"`
	MachineName string `json:"machine_name"`
	Guest       Guest  `json:"guest"`
	Kernel      string `json:"kernel,omitempty"`
	Initramfs   string `json:"initramfs,omitempty"`
	Cmdline     string `json:"cmdline,omitempty"`
}

// Activated is the config of a run that was told so; nil changes nothing. An
// empty Kernel, Initramfs or Cmdline leaves that of the config.
func (c Config) Activated(a *Activation) Config {
	if a == nil {
		return c
	}
	c.Run.MachineID, c.Run.MachineName, c.Guest = a.MachineID, a.MachineName, a.Guest
	c.Run.Kernel = cmp.Or(a.Kernel, c.Run.Kernel)
	c.Run.Initramfs = cmp.Or(a.Initramfs, c.Run.Initramfs)
	c.Run.Cmdline = cmp.Or(a.Cmdline, c.Run.Cmdline)
	return c
}

// Socket is where the monitor of the run listens.
func (c Config) Socket() string { return filepath.Join(c.Run.SocketDir, socketFile) }

// Name is what people call the machine.
func (c Config) Name() string {
	if c.Run.MachineName == "" {
		return c.Run.MachineID
	}
	return c.Run.MachineName
}

// WriteConfig puts cfg into the run's folder dir, which must exist.
func WriteConfig(files *durable.FS, dir string, cfg Config) error {
	cfg.Version = configVersion
	b, err := json.MarshalIndent(cfg, "", "  ")
	if err != nil {
		return fmt.Errorf("encode config of run %s: %w", cfg.Run.RunID, err)
	}
	return files.WriteFile(filepath.Join(dir, ConfigFile), append(b, '\n'), 0o600)
}

// ReadConfig reads the config of the run's folder dir.
func ReadConfig(dir string) (Config, error) {
	var cfg Config
	if err := readJSON(filepath.Join(dir, ConfigFile), &cfg); err != nil {
		return Config{}, err
	}
	return cfg, checkVersion(filepath.Join(dir, ConfigFile), cfg.Version, configVersion)
}

// maxStateFile bounds what is read of a state file, in bytes: a chain of some
// thousand layers is far below it.
const maxStateFile = 4 << 20

func readJSON(path string, into any) error {
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.New(errdefs.NotFound, "read %q: %w", path, fs.ErrNotExist)
	}
	if err != nil {
		return errdefs.New(errdefs.Storage, "read %q: %w", path, err)
	}
	if st.Size() > maxStateFile {
		return errdefs.New(errdefs.Storage, "read %q: it has %d bytes, more than the limit of %d", path, st.Size(), maxStateFile)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return errdefs.New(errdefs.Storage, "read %q: %w", path, err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return errdefs.New(errdefs.Storage, "read %q: not what holdpoint wrote: %w", path, err)
	}
	return nil
}

func checkVersion(path string, got, known int) error {
	switch {
	case got > known:
		return errdefs.New(errdefs.Incompatible, "read %q: version %d, but this build knows only up to %d; use the newer holdpoint", path, got, known)
	case got < 1:
		return errdefs.New(errdefs.Storage, "read %q: it has no version", path)
	}
	return nil
}
