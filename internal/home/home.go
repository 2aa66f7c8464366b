// Package home says where a holdpoint home keeps what: the layout of its
// folders and the private place of its sockets. It creates nothing but the
// home's own folders and reads nothing in them.
package home

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// maxSocketPath is the longest path a socket of ours may have, in bytes. The
// kernel's limit is 107 (sockaddr_un(7)).
const maxSocketPath = 100

// longestSocket is the longest name below the runtime folder.
const longestSocket = "/r/0123456789abcdef/monitor.sock"

// Home is one home: all state of one daemon. Its methods give absolute paths.
type Home struct {
	dir     string
	runtime string
}

// Default is $HOLDPOINT_HOME, else /var/lib/holdpoint for root, else
// $XDG_STATE_HOME/holdpoint, else ~/.local/state/holdpoint.
func Default() (string, error) {
	if dir := os.Getenv("HOLDPOINT_HOME"); dir != "" {
		return dir, nil
	}
	if os.Geteuid() == 0 {
		return "/var/lib/holdpoint", nil
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "holdpoint"), nil
	}
	user, err := os.UserHomeDir()
	if err != nil {
		return "", errdefs.New(errdefs.Invalid, "find the home: neither HOLDPOINT_HOME nor HOME is set; set HOLDPOINT_HOME")
	}
	return filepath.Join(user, ".local", "state", "holdpoint"), nil
}

// Open decides the layout of the home in dir, which need not exist yet. A home
// whose sockets would have no private place with a short enough path is INVALID.
func Open(dir string) (*Home, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("resolve home %q: %w", dir, err)
	}
	h := &Home{dir: abs, runtime: filepath.Join(abs, "run")}
	if len(h.runtime)+len(longestSocket) < maxSocketPath {
		return h, nil
	}
	// The home's path is too long for sockets. The user's runtime folder is
	// the one other private place; it is not the first choice because it
	// goes away at logout, and machines run on.
	sum := sha256.Sum256([]byte(abs))
	xdg := os.Getenv("XDG_RUNTIME_DIR")
	h.runtime = filepath.Join(xdg, "holdpoint-"+hex.EncodeToString(sum[:4]))
	if !filepath.IsAbs(xdg) || durable.CheckPrivate(xdg) != nil || len(h.runtime)+len(longestSocket) >= maxSocketPath {
		return nil, errdefs.New(errdefs.Invalid,
			"home %s: its path is too long for sockets and XDG_RUNTIME_DIR is no private folder; set HOLDPOINT_HOME to a path of at most %d bytes",
			abs, maxSocketPath-len(longestSocket)-len("/run")-1)
	}
	return h, nil
}

// Create makes the home's folders, private to the user (0700). A folder that
// is there with another owner or for others to enter is DENIED.
func (h *Home) Create() error {
	var files *durable.FS
	for _, dir := range []string{h.dir, h.runtime, filepath.Join(h.runtime, "r"), h.Images(), h.Layers(), h.Runs(), h.Cache(), h.MemoryFiles(), h.LogDir()} {
		if err := files.MkdirAll(dir); err != nil {
			return err
		}
	}
	return nil
}

// Dir is the home's own folder.
func (h *Home) Dir() string { return h.dir }

// Socket is where the daemon listens.
func (h *Home) Socket() string { return filepath.Join(h.runtime, "daemon.sock") }

// Lock is held by the one daemon of the home as long as it lives.
func (h *Home) Lock() string { return filepath.Join(h.dir, "daemon.lock") }

// LogDir is for the daemon's and image builds' logs.
func (h *Home) LogDir() string { return filepath.Join(h.dir, "log") }

// DaemonLog is what a daemon started by the command line prints.
func (h *Home) DaemonLog() string { return filepath.Join(h.LogDir(), "daemon.log") }

// AccessLogs is the folder of what came through routes, by machine and route.
func (h *Home) AccessLogs() string { return filepath.Join(h.LogDir(), "routes") }

// ProxyPort remembers the port of the proxy, so that published URLs stay.
func (h *Home) ProxyPort() string { return filepath.Join(h.dir, "proxy.port") }

// Reserve keeps some bytes back for when the disk is full.
func (h *Home) Reserve() string { return filepath.Join(h.dir, "reserve") }

// Catalog is the SQLite database.
func (h *Home) Catalog() string { return filepath.Join(h.dir, "catalog.db") }

// Images has a folder for each image, called by its build id.
func (h *Home) Images() string { return filepath.Join(h.dir, "images") }

// Layers has the disk layers, called by their ids.
func (h *Home) Layers() string { return filepath.Join(h.dir, "layers") }

// Layer is the final path of a disk layer.
func (h *Home) Layer(id string) string { return filepath.Join(h.Layers(), id+".qcow2") }

// RawLayer is the final path of a raw disk, or of a copy of one.
func (h *Home) RawLayer(id string) string { return filepath.Join(h.Layers(), id+".raw") }

// Cache is for what can be made again.
func (h *Home) Cache() string { return filepath.Join(h.dir, "cache") }

// Runs has a folder for each run, called by its id. Whose run it is stands in
// its record: a standby is nobody's yet.
func (h *Home) Runs() string { return filepath.Join(h.dir, "runs") }

// Run is the folder of one run.
func (h *Home) Run(runID string) string { return filepath.Join(h.Runs(), runID) }

// MemoryLayer is the final path of a memory layer.
func (h *Home) MemoryLayer(id string) string { return filepath.Join(h.Layers(), id+".memory") }

// DeviceLayer is the final path of the state of CPUs and devices.
func (h *Home) DeviceLayer(id string) string { return filepath.Join(h.Layers(), id+".devices") }

// MergedDisks has files that the lower layers of long disk chains were merged
// into; they can be made again.
func (h *Home) MergedDisks() string { return filepath.Join(h.Cache(), "disk") }

// MemoryFiles has the memory of full checkpoints as files that runs map; they
// can be made again from the layers.
func (h *Home) MemoryFiles() string { return filepath.Join(h.Cache(), "memory") }

// RunSockets is the folder of one run's sockets.
func (h *Home) RunSockets(runID string) string { return filepath.Join(h.runtime, "r", runID) }
