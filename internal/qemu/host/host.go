//go:build linux

package host

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
)

// Config is what a Host needs. The zero value works.
type Config struct {
	// Binary is qemu-system-x86_64, as a path or a name on PATH.
	Binary string
	// ImgBinary is qemu-img; only looked for.
	ImgBinary string
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

// Host answers questions about this host and its QEMU.
type Host struct {
	cfg Config
	log *slog.Logger

	// probing is held while a probe runs, so that two callers run one.
	probing sync.Mutex
	known   *Capabilities
	knownBy string
}

// New returns a Host. Nothing is started or looked for yet.
func New(cfg Config) *Host {
	if cfg.Binary == "" {
		cfg.Binary = "qemu-system-x86_64"
	}
	if cfg.ImgBinary == "" {
		cfg.ImgBinary = "qemu-img"
	}
	if cfg.KVMDevice == "" {
		cfg.KVMDevice = "/dev/kvm"
	}
	if cfg.KVMLimit == 0 {
		cfg.KVMLimit = 10 * time.Second
	}
	h := &Host{cfg: cfg, log: cfg.Logger}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	return h
}

// cached reads what was once learned under key into v.
func (h *Host) cached(kind, key string, v any) bool {
	if h.cfg.CacheDir == "" {
		return false
	}
	b, err := os.ReadFile(h.cacheFile(kind, key))
	return err == nil && json.Unmarshal(b, v) == nil
}

// remember keeps v under key. Not being able to costs time later and is no error.
func (h *Host) remember(ctx context.Context, kind, key string, v any) {
	if h.cfg.CacheDir == "" {
		return
	}
	b, err := json.Marshal(v)
	if err == nil {
		err = h.cfg.FS.MkdirAll(h.cfg.CacheDir)
	}
	if err == nil {
		err = h.cfg.FS.WriteFile(h.cacheFile(kind, key), b, 0o600)
	}
	if err != nil {
		h.log.WarnContext(ctx, "probe not remembered", "kind", kind, "error", err)
	}
}

func (h *Host) cacheFile(kind, key string) string {
	sum := sha256.Sum256([]byte(key))
	return filepath.Join(h.cfg.CacheDir, kind+"-"+hex.EncodeToString(sum[:8])+".json")
}

// fileKey names a file's content without reading it.
func fileKey(path string) (string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("look at %q: %w", path, err)
	}
	return fmt.Sprintf("%s|%d|%d", path, st.Size(), st.ModTime().UnixNano()), nil
}
