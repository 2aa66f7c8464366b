//go:build linux

package monitor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// The times of KillRun: how long a monitor that can be reached may take to end
// its run by itself, and how long all of it may.
const (
	askLimit  = 5 * time.Second
	killLimit = 60 * time.Second
)

// KillRun ends the run in the folder dir as a power cut would, for when its
// monitor cannot be had: config and record may be damaged or gone, the monitor
// may hang, or fail each time. A monitor that answers is asked; else it is
// killed, and then every process that carries the mark of the folder. When it
// returns nil, their ends are proven, no monitor lives, and the record says
// that the run has ended: as it was recorded before, if nothing lived any more,
// else killed and not clean. The chain of a record that could not be read is
// that of the config, or empty: only the caller can know better.
//
// It needs not be the parent of any of them, but of their user. Nobody may
// start a monitor for the folder meanwhile; one that is, is killed. On error
// nothing is recorded, and it may be called again. files is the door to the
// disk; nil is the usual one.
func KillRun(ctx context.Context, files *durable.FS, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, killLimit)
	defer cancel()
	if _, err := os.Stat(dir); err != nil {
		return errdefs.New(errdefs.NotFound, "kill run in %q: %w", dir, err)
	}
	if _, err := ReadRecord(dir); errdefs.Is(err, errdefs.Incompatible) {
		return err // the newer build's record would be lost
	}
	askToKill(ctx, dir)
	lock, err := seize(ctx, dir)
	if err != nil {
		return fmt.Errorf("kill run in %q: %w", dir, err)
	}
	defer lock.Close()
	pids, err := Living(dir)
	if err != nil {
		return err
	}
	if err := EndLiving(ctx, dir); err != nil {
		return err
	}
	rec, err := ReadRecord(dir)
	if err == nil && rec.Phase == Exited && len(pids) == 0 {
		return nil
	}
	if err != nil {
		rec = restored(dir)
	}
	rec.Phase, rec.Failure = Exited, nil
	rec.Exit = &Exit{Exit: machine.Exit{Reason: machine.Killed, Message: "ended by force: no monitor could be had"}}
	return WriteRecord(files, dir, rec)
}

// askToKill lets a monitor that answers end its run. Whether it did is looked
// at afterwards, not believed.
func askToKill(ctx context.Context, dir string) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	c, err := Connect(ctx, dir)
	if err != nil {
		return
	}
	defer c.Close()
	_, _ = c.Kill(ctx)
}

// seize takes the place of the folder's monitor, for good: it kills those that
// are there until the lock is ours.
func seize(ctx context.Context, dir string) (*os.File, error) {
	for {
		err := endAll(ctx, dir, func() ([]int, error) { return monitors(dir) })
		if err != nil {
			return nil, err
		}
		lock, err := TakeLock(dir)
		if err == nil || !errdefs.Is(err, errdefs.Conflict) {
			return lock, err
		}
		if ctx.Err() != nil {
			return nil, errdefs.New(errdefs.Deadline, "%w, and it is not found among the processes of this user", err)
		}
		if pid, _ := Holder(dir); pid == 0 {
			select { // another one that looks after the folder, such as ourselves
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}

// monitors gives the monitors of the folder: the holder of its lock, and those
// that are just starting or have lost their lock file.
func monitors(dir string) ([]int, error) {
	pids, err := find(dir, monitorMark)
	if err != nil {
		return nil, err
	}
	if pid, err := Holder(dir); err == nil && pid > 0 && !slices.Contains(pids, pid) {
		pids = append(pids, pid)
	}
	return pids, nil
}

// restored is a record made of what is left without one.
func restored(dir string) Record {
	rec := Record{RunID: filepath.Base(dir)}
	if cfg, err := ReadConfig(dir); err == nil {
		rec.MachineID, rec.RunID, rec.Disk = cfg.Run.MachineID, cfg.Run.RunID, cfg.Run.Disk
	}
	return rec
}

// begunFile is made once the first record is there. With it and without a
// record, the record was lost: what the folder's config says may be long over.
const begunFile = "begun.json"

// MarkBegun notes in the folder that its run was recorded, before it is begun.
func MarkBegun(files *durable.FS, dir string) error {
	path := filepath.Join(dir, begunFile)
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	return files.WriteFile(path, []byte("{}\n"), 0o600)
}

// CheckLost refuses (OUTCOME_UNKNOWN) a folder without a record whose run was
// begun: what has become of the run cannot be told, and must not be guessed.
func CheckLost(dir string) error {
	pids, err := Living(dir)
	if err != nil {
		return err
	}
	if len(pids) > 0 {
		return errdefs.New(errdefs.OutcomeUnknown, "machine %s: a process of this run lives (%s) but its record is gone; stop it by force", nameOf(dir), list(pids))
	}
	_, err = os.Lstat(filepath.Join(dir, begunFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errdefs.New(errdefs.Storage, "look for %q: %w", begunFile, err)
	}
	return errdefs.New(errdefs.OutcomeUnknown, "machine %s: its run was begun but its record is gone; stop it by force", nameOf(dir))
}

func list(pids []int) string {
	words := make([]string, len(pids))
	for i, pid := range pids {
		words[i] = fmt.Sprint(pid)
	}
	return "process " + strings.Join(words, ", ")
}

// nameOf is what people call the folder's machine, as far as can be told.
func nameOf(dir string) string {
	cfg, err := ReadConfig(dir)
	if err != nil {
		return "of run " + filepath.Base(dir)
	}
	if rec, err := ReadRecord(dir); err == nil {
		cfg = cfg.Activated(rec.Activation)
	}
	return cfg.Name()
}
