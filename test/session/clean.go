package session

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/rogpeppe/go-internal/testscript"
	_ "modernc.org/sqlite" // the catalog is read behind the daemon's back

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

func cmdClean(ts *testscript.TestScript, neg bool, args []string) {
	Usage(ts, neg, args, 0, "clean")
	ts.Check(Of(ts).Clean())
}

// Clean fails when something half-made is left:
//
//   - an operation that has not ended, a lease, a displaced disk;
//   - a layer on the disk that the catalog does not know, or the other way
//     round, or that nothing refers to;
//   - a run's folder that is neither a machine's nor a standby's, or a socket
//     folder without a run;
//   - what was captured of a run, but for its checkpoint;
//   - a memory file that is missing although a run maps it;
//   - a standby without a pool, or more of them than it has;
//   - a machine that is still being made, or suspended without its memory;
//   - more or fewer processes than machines and standbys have by their states;
//   - an image's folder that the catalog does not know.
//
// What ends in the background is given time to.
func (s *Session) Clean() error {
	return Await(func() error {
		return errors.Join(s.checkCatalog(), s.checkProcesses())
	})
}

// query gives the first columns of all rows.
func query(db *sql.DB, text string) ([]string, error) {
	rows, err := db.Query(text)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var found []string
	for rows.Next() {
		var v string
		if err := rows.Scan(&v); err != nil {
			return nil, err
		}
		found = append(found, v)
	}
	return found, rows.Err()
}

// Catalog opens the catalog to read it behind the daemon's back.
func (s *Session) Catalog() (*sql.DB, error) {
	return sql.Open("sqlite", "file:"+filepath.Join(s.Home, "catalog.db")+"?mode=ro&_pragma=busy_timeout(5000)")
}

// mustBeEmpty are queries that find what is half-made.
var mustBeEmpty = map[string]string{
	"unfinished operation": `SELECT verb || ' ' || id || ' in phase ' || phase FROM operations WHERE state = 'running'`,
	"lease":                `SELECT kind || ' ' || resource_id FROM leases`,
	"displaced disk":       `SELECT operation_id FROM displaced`,
	"half-made machine":    `SELECT name FROM machines WHERE state IN ('creating', 'unknown')`,
	"unreferenced layer": `SELECT format || ' ' || id FROM layers WHERE id NOT IN (SELECT layer_id FROM chains)
		AND id NOT IN (SELECT layer_id FROM checkpoint_layers)
		AND id NOT IN (SELECT layer_id FROM checkpoint_memory)
		AND id NOT IN (SELECT devices_layer FROM checkpoint_full)
		AND id NOT IN (SELECT layer_id FROM machine_memory)
		AND id NOT IN (SELECT layer_id FROM standbys)`,
	"misplaced layer": `SELECT format || ' ' || path FROM layers WHERE path NOT LIKE 'layers/' || id || CASE format
		WHEN 'memory' THEN '.memory' WHEN 'devices' THEN '.devices' ELSE '.%' END`,
	"full checkpoint without memory": `SELECT id FROM checkpoints WHERE (kind = 'full') <> (id IN (SELECT checkpoint_id FROM checkpoint_full)
		AND id IN (SELECT checkpoint_id FROM checkpoint_memory))`,
	"suspended machine without memory": `SELECT name FROM machines WHERE state = 'suspended'
		AND (head_checkpoint IS NULL OR memory_head <> head_checkpoint OR id NOT IN (SELECT machine_id FROM machine_memory))`,
	"checkpoint of nobody": `SELECT id FROM checkpoints WHERE machine_id IS NULL AND id NOT IN (SELECT checkpoint_id FROM image_boots)`,
	"standby too many": `SELECT checkpoint_id FROM standbys LEFT JOIN pools USING (checkpoint_id)
		GROUP BY checkpoint_id HAVING count(*) > coalesce(max(pools.count), 0)`,
}

// living are the run ids of machines that have processes, and of standbys.
const living = `SELECT run_id FROM machines WHERE state IN ('running', 'paused') UNION ALL SELECT run_id FROM standbys`

// mapped are the memory files of runs.
const mapped = `SELECT memory_file FROM machines WHERE state IN ('running', 'paused') AND memory_file <> ''
	UNION SELECT m.layer_id FROM checkpoint_memory m JOIN standbys USING (checkpoint_id)
		WHERE position = (SELECT max(position) FROM checkpoint_memory WHERE checkpoint_id = m.checkpoint_id)`

func (s *Session) checkCatalog() error {
	db, err := s.Catalog()
	if err != nil {
		return err
	}
	defer db.Close()
	var wrong []error
	for what, text := range mustBeEmpty {
		found, err := query(db, text)
		if err != nil {
			return fmt.Errorf("look for %s: %w", what, err)
		}
		for _, f := range found {
			wrong = append(wrong, fmt.Errorf("%s: %s", what, f))
		}
	}
	for folder, text := range map[string]string{
		"layers": `SELECT substr(path, length('layers/') + 1) FROM layers`,
		"images": `SELECT build_id FROM images`,
		"run/r":  living,
	} {
		want, err := query(db, text)
		if err != nil {
			return fmt.Errorf("list %s: %w", folder, err)
		}
		wrong = append(wrong, sameNames(filepath.Join(s.Home, folder), want))
	}
	machines, err := query(db, `SELECT id FROM machines`)
	if err != nil {
		return err
	}
	standbys, err := query(db, `SELECT run_id FROM standbys`)
	if err != nil {
		return err
	}
	files, err := query(db, mapped)
	if err != nil {
		return err
	}
	for _, id := range files {
		if _, err := os.Stat(filepath.Join(s.Home, "cache", "memory", id)); err != nil {
			wrong = append(wrong, fmt.Errorf("a run maps a memory file: %w", err))
		}
	}
	return errors.Join(append(wrong, s.checkRuns(machines, standbys))...)
}

// checkRuns finds the folders of runs that are no machine's and no standby's,
// and what captures left in them.
func (s *Session) checkRuns(machines, standbys []string) error {
	runs, err := filepath.Glob(filepath.Join(s.Home, "runs", "*"))
	if err != nil {
		return err
	}
	staged, err := filepath.Glob(filepath.Join(s.Home, "runs", "*", "capture-*"))
	if err != nil {
		return err
	}
	var wrong []error
	for _, path := range staged {
		wrong = append(wrong, fmt.Errorf("captured, and no checkpoint: %s", path))
	}
	for _, dir := range runs {
		if owner := monitor.Owner(dir); !slices.Contains(machines, owner) && !slices.Contains(standbys, filepath.Base(dir)) {
			wrong = append(wrong, fmt.Errorf("run %s is of machine %q, which there is not, and no standby", dir, owner))
		}
	}
	return errors.Join(wrong...)
}

// sameNames compares what is in a folder with what should be.
func sameNames(folder string, want []string) error {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		return fmt.Errorf("folder %s has %v, the catalog %v", folder, got, want)
	}
	return nil
}

// checkProcesses compares the processes with the machines' states: a running
// or paused one has a monitor and a machine process, as a standby has, another
// has none.
func (s *Session) checkProcesses() error {
	db, err := s.Catalog()
	if err != nil {
		return err
	}
	defer db.Close()
	alive, err := query(db, living)
	if err != nil {
		return err
	}
	procs, err := s.Processes()
	if err != nil {
		return err
	}
	monitors, machines := 0, 0
	var wrong []error
	for _, p := range procs {
		switch {
		case p.IsMonitor():
			monitors++
		case p.IsMachine():
			machines++
		case len(alive) == 0 && !p.IsDaemon():
			wrong = append(wrong, fmt.Errorf("process %d is left: %s", p.PID, p.Cmdline))
		}
	}
	if monitors != len(alive) || machines != len(alive) {
		wrong = append(wrong, fmt.Errorf("%d machines and standbys are alive, with %d monitors and %d machine processes", len(alive), monitors, machines))
	}
	return errors.Join(wrong...)
}

// PutImage records an image whose folder is in the home; no daemon runs.
func (s *Session) PutImage(i catalog.Image) error {
	ctx := context.Background()
	c, err := catalog.Open(ctx, catalog.Config{Path: filepath.Join(s.Home, "catalog.db")})
	if err != nil {
		return err
	}
	return errors.Join(c.PutImage(ctx, i), c.Close())
}
