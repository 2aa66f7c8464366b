//go:build linux

package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Config is what a QEMU needs. The zero value works.
type Config struct {
	// Binary is qemu-system-x86_64, as a path or a name on PATH.
	Binary string
	// CacheDir keeps what was probed; empty means to probe anew each time.
	CacheDir string
	// Accelerator is "kvm" or "tcg" to skip the probe of KVM; empty to probe.
	// The program's main sets it, from HOLDPOINT_ACCEL, for tests.
	Accelerator string
	// KVMDevice is /dev/kvm unless a test says otherwise.
	KVMDevice string
	// KVMLimit is how long a kernel may take to its first marker under KVM;
	// 10 s if zero. Where KVM works it takes less than one.
	KVMLimit time.Duration
	// FS is the door through which the cache reaches the disk; nil is the real one.
	FS     *durable.FS
	Logger *slog.Logger
}

// QEMU is a machine.Hypervisor. It holds no process: runs do.
type QEMU struct {
	cfg Config
	log *slog.Logger

	// probing is held while a probe runs, so that two callers run one.
	probing sync.Mutex
	known   *Capabilities
	knownBy string
}

var _ machine.Hypervisor = (*QEMU)(nil)

// New returns a QEMU. Nothing is started or looked for yet.
func New(cfg Config) *QEMU {
	if cfg.Binary == "" {
		cfg.Binary = "qemu-system-x86_64"
	}
	if cfg.KVMDevice == "" {
		cfg.KVMDevice = "/dev/kvm"
	}
	if cfg.KVMLimit == 0 {
		cfg.KVMLimit = 10 * time.Second
	}
	q := &QEMU{cfg: cfg, log: cfg.Logger}
	if q.log == nil {
		q.log = slog.New(slog.DiscardHandler)
	}
	return q
}

// The names in a run's folders.
const (
	memoryFile  = "memory"
	consoleFile = "console.log"
	outputFile  = "qemu.log"
	pidFile     = "qemu.pid"
	killFile    = "killed"
	eventsPipe  = "events"     // the name QEMU takes; the files are:
	eventsIn    = "events.in"  // a pipe
	eventsOut   = "events.out" // a file

	qmpSocket  = "qmp.sock"
	linkSocket = "link.sock"

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
	case len(filepath.Join(cfg.SocketDir, linkSocket)) > maxSocketPath:
		return bad("path of sockets %q is longer than %d bytes; choose a shorter HOLDPOINT_HOME", cfg.SocketDir, maxSocketPath-len(linkSocket)-1)
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
	if cfg.Kernel != "" { // a guest may boot from its disk
		files["kernel"] = cfg.Kernel
	}
	if cfg.Initramfs != "" {
		files["initramfs"] = cfg.Initramfs
	}
	for what, path := range files {
		if _, err := os.Stat(path); err != nil {
			return errdefs.New(errdefs.NotFound, "launch run %q: find %s: %w", cfg.RunID, what, err)
		}
	}
	return nil
}

// cached reads what was once learned under key into v.
func (q *QEMU) cached(kind, key string, v any) bool {
	if q.cfg.CacheDir == "" {
		return false
	}
	b, err := os.ReadFile(q.cacheFile(kind, key))
	return err == nil && json.Unmarshal(b, v) == nil
}

// remember keeps v under key. Not being able to costs time later and is no error.
func (q *QEMU) remember(ctx context.Context, kind, key string, v any) {
	if q.cfg.CacheDir == "" {
		return
	}
	b, err := json.Marshal(v)
	if err == nil {
		err = q.cfg.FS.MkdirAll(q.cfg.CacheDir)
	}
	if err == nil {
		err = q.cfg.FS.WriteFile(q.cacheFile(kind, key), b, 0o600)
	}
	if err != nil {
		q.log.WarnContext(ctx, "probe not remembered", "kind", kind, "error", err)
	}
}

func (q *QEMU) cacheFile(kind, key string) string {
	sum := sha256.Sum256([]byte(key))
	return filepath.Join(q.cfg.CacheDir, kind+"-"+hex.EncodeToString(sum[:8])+".json")
}

// fileKey names a file's content without reading it.
func fileKey(path string) (string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("look at %q: %w", path, err)
	}
	return fmt.Sprintf("%s|%d|%d", path, st.Size(), st.ModTime().UnixNano()), nil
}
