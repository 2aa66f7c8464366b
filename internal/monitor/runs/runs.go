//go:build linux

// Package runs finds the folders of a machine's runs, present and ended. What is
// in them is the affair of package monitor.
package runs

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// Of gives the folders below root of the machine's runs, newest first.
func Of(root, machineID string) ([]string, error) {
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
		if monitor.Owner(dir) != machineID {
			continue
		}
		info, err := os.Stat(filepath.Join(dir, monitor.ConfigFile))
		if err != nil {
			continue // just being removed
		}
		begun[dir] = info.ModTime().UnixNano()
		dirs = append(dirs, dir)
	}
	slices.SortFunc(dirs, func(a, b string) int { return cmp.Compare(begun[b], begun[a]) })
	return dirs, nil
}
