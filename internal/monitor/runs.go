//go:build linux

package monitor

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// RunsOf gives the folders below root of the machine's runs, newest first.
func RunsOf(root, machineID string) ([]string, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, errdefs.New(errdefs.Storage, "list runs: %w", err)
	}
	begun := map[string]int64{}
	var dirs []string
	for _, entry := range entries {
		dir := filepath.Join(root, entry.Name())
		if Owner(dir) != machineID {
			continue
		}
		info, err := os.Stat(filepath.Join(dir, configFile))
		if err != nil {
			continue // just being removed
		}
		begun[dir] = info.ModTime().UnixNano()
		dirs = append(dirs, dir)
	}
	slices.SortFunc(dirs, func(a, b string) int { return cmp.Compare(begun[b], begun[a]) })
	return dirs, nil
}

// Owner is the machine whose run is in dir, as its record says, or its config
// before there is one; empty when neither can be read.
func Owner(dir string) string {
	if rec, err := ReadRecord(dir); err == nil {
		return rec.MachineID
	}
	cfg, err := ReadConfig(dir)
	if err != nil {
		return ""
	}
	return cfg.Run.MachineID
}
