//go:build linux

package guest

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/holdpoint/holdpoint/internal/accesslog"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/runs"
)

// consoles are the console logs of a machine's runs.
type consoles struct {
	// runs is the folder of all runs.
	runs    string
	machine catalog.Machine
}

func (c consoles) silent() string {
	name := c.machine.Name
	dirs, err := runs.Of(c.runs, c.machine.ID)
	if err != nil || len(dirs) == 0 {
		return "no console of machine " + name + " is kept"
	}
	cfg, err := monitor.ReadConfig(dirs[0])
	switch {
	case err != nil || cfg.Run.Incoming == nil:
		return "the console of machine " + name + " has said nothing yet"
	case cfg.Run.Incoming.Unconfigured:
		return "machine " + name + " continued from its image's kept boot, and its console has said nothing since"
	}
	return "machine " + name + " continued from a checkpoint, and its console has said nothing since"
}

func (c consoles) files() ([]string, error) {
	dirs, err := runs.Of(c.runs, c.machine.ID)
	if err != nil {
		return nil, err
	}
	var paths []string
	modified := map[string]int64{}
	for _, dir := range dirs {
		path := filepath.Join(dir, "console.log")
		if info, err := os.Stat(path); err == nil {
			paths = append(paths, path)
			modified[path] = info.ModTime().UnixNano()
		}
	}
	slices.SortFunc(paths, func(a, b string) int { return cmp.Compare(modified[a], modified[b]) })
	return paths, nil
}

// folders are those of all runs: whose a new one is, its config says in a moment.
func (c consoles) folders() ([]string, error) {
	dirs, err := filepath.Glob(filepath.Join(c.runs, "*"))
	if err != nil {
		return nil, fmt.Errorf("list runs: %w", err)
	}
	return append(dirs, c.runs), nil
}

// visits are what came through a route of a machine.
type visits struct {
	log     *accesslog.Log
	machine catalog.Machine
	host    string
}

// visits gives the log of a route, which may be withdrawn by now.
func (s *Service) visits(ctx context.Context, m catalog.Machine, name string) (source, error) {
	host, err := machine.CheckRoute(name)
	if err != nil {
		return nil, err
	}
	v := visits{log: accesslog.New(s.cfg.Home.AccessLogs()), machine: m, host: host}
	files, err := v.files()
	if err != nil || len(files) > 0 {
		return v, err
	}
	route, err := s.cfg.Catalog.GetRoute(ctx, host)
	if err != nil {
		return nil, err
	}
	if route.MachineID != m.ID {
		return nil, errdefs.New(errdefs.NotFound, "route %q of machine %s: it leads to machine %s; look at: holdpoint logs %s --route %s",
			host, m.Name, route.Machine, route.Machine, host)
	}
	// It can be watched only when it is there.
	if err := os.MkdirAll(v.log.Folder(m.ID, host), 0o700); err != nil {
		return nil, errdefs.New(errdefs.Storage, "make the folder of a log: %w", err)
	}
	return v, nil
}

func (v visits) files() ([]string, error) { return v.log.Files(v.machine.ID, v.host) }

func (v visits) folders() ([]string, error) { return []string{v.log.Folder(v.machine.ID, v.host)}, nil }

func (v visits) silent() string {
	return "nothing came through " + v.host + " to machine " + v.machine.Name + " yet"
}
