//go:build linux

package qemu

import (
	"log/slog"
	"os"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qemu/isolation"
)

// Config is what a QEMU needs.
type Config struct {
	// Host knows the binary and what it can do.
	Host   *host.Host
	Logger *slog.Logger
	// Without are parts of the isolation that are left out, for tests of a host
	// that has not got them.
	Without isolation.Without
}

// QEMU is a machine.Hypervisor. It holds no process: runs do.
type QEMU struct {
	host    *host.Host
	log     *slog.Logger
	without isolation.Without
}

var _ machine.Hypervisor = (*QEMU)(nil)

// New returns a QEMU. Nothing is started or looked for yet.
func New(cfg Config) *QEMU {
	q := &QEMU{host: cfg.Host, log: cfg.Logger, without: cfg.Without}
	if q.log == nil {
		q.log = slog.New(slog.DiscardHandler)
	}
	return q
}

// The names in a run's folders.
const (
	memoryFile  = argv.Memory
	consoleFile = argv.Console
	outputFile  = "qemu.log"
	pidFile     = argv.PIDFile
	killFile    = "killed"
	eventsIn    = argv.EventsIn
	eventsOut   = argv.EventsOut

	qmpSocket  = "qmp.sock"
	linkSocket = "link.sock"
	netSocket  = argv.Network

	// maxSocketPath is the length the kernel allows for a socket's path.
	maxSocketPath = 107
)

// check refuses what QEMU would only refuse in words of its own.
func check(cfg machine.RunConfig) error {
	bad := func(format string, args ...any) error {
		return errdefs.New(errdefs.Invalid, "launch run %q: "+format, append([]any{cfg.RunID}, args...)...)
	}
	switch {
	case !filepath.IsAbs(cfg.Dir) || !filepath.IsAbs(cfg.SocketDir):
		return bad("folder %q or %q is not absolute", cfg.Dir, cfg.SocketDir)
	case len(filepath.Join(cfg.SocketDir, netSocket)) > maxSocketPath:
		return bad("path of sockets %q is longer than %d bytes; choose a shorter HOLDPOINT_HOME", cfg.SocketDir, maxSocketPath-len(netSocket)-1)
	case cfg.Accelerator != "kvm" && cfg.Accelerator != "tcg":
		return bad("accelerator %q is not kvm or tcg", cfg.Accelerator)
	case cfg.MemoryBytes < 1<<20 || cfg.MemoryBytes%(1<<20) != 0:
		return bad("memory of %d bytes is not a multiple of 1 MiB", cfg.MemoryBytes)
	case cfg.CPUs < 1:
		return bad("%d CPUs", cfg.CPUs)
	case len(cfg.Disk) == 0:
		return bad("it has no disk")
	}
	files := map[string]string{}
	for _, l := range cfg.Disk {
		files["disk layer "+l.ID] = l.Path
	}
	if cfg.Kernel != "" && cfg.Incoming == nil { // a guest may boot from its disk
		files["kernel"] = cfg.Kernel
	}
	if cfg.Initramfs != "" && cfg.Incoming == nil {
		files["initramfs"] = cfg.Initramfs
	}
	for what, path := range files {
		if _, err := os.Stat(path); err != nil {
			return errdefs.New(errdefs.NotFound, "launch run %q: find %s: %w", cfg.RunID, what, err)
		}
	}
	return checkIncoming(cfg)
}
