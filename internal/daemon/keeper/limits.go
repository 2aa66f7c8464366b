//go:build linux

package keeper

import (
	"errors"

	"github.com/holdpoint/holdpoint/internal/cgroup"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// CheckLimits refuses (UNSUPPORTED) a spec with limits that this host cannot
// hold a machine to.
func (k *Keeper) CheckLimits(s machine.Spec) error {
	if s.CPULimitMillis == 0 && s.MemoryLimitBytes == 0 {
		return nil
	}
	return k.cfg.Groups.Check()
}

// group is the folder of the group that holds the run to its machine's limits;
// "" for none. Each run has its own: while a restore goes on there are two.
func (k *Keeper) group(l launch) (string, error) {
	s := l.machine.Spec
	if l.machine.ID == "" || s.CPULimitMillis == 0 && s.MemoryLimitBytes == 0 {
		return "", nil
	}
	return k.cfg.Groups.Group(l.RunID, cgroup.Limits{CPUMillis: s.CPULimitMillis, MemoryBytes: s.MemoryLimitBytes})
}

// limit holds a run that was nobody's so far to its machine's limits.
func (k *Keeper) limit(l launch, run *fleet.Run) error {
	dir, err := k.group(l)
	if err != nil || dir == "" {
		return err
	}
	status := run.Status()
	return errors.Join(cgroup.Put(dir, status.GetMonitorPid()), cgroup.Put(dir, status.GetQemuPid()))
}
