//go:build linux

package keeper

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Source is a machine's current run, for a capture or a restore.
type Source struct {
	keeper   *Keeper
	run      *fleet.Run
	machine  string
	patience time.Duration
	note     func(format string, args ...any)
}

// Source gives the machine's run to a capture or restore; patience is how long
// its guest may take to shut down, and note is told what a person should read.
func (k *Keeper) Source(machineID string, run *fleet.Run, patience time.Duration, note func(string, ...any)) *Source {
	return &Source{keeper: k, run: run, machine: machineID, patience: patience, note: note}
}

// Stop asks the guest to shut down within the patience.
func (s *Source) Stop(ctx context.Context) (clean bool, err error) {
	return s.run.Stop(ctx, s.patience)
}

// Kill ends the run as a power cut would.
func (s *Source) Kill(ctx context.Context) error { return s.run.Kill(ctx) }

// Pause stops the vCPUs.
func (s *Source) Pause(ctx context.Context) error { return s.run.Pause(ctx) }

// Resume lets the vCPUs go.
func (s *Source) Resume(ctx context.Context) error { return s.run.Resume(ctx) }

// SwitchDisk gives the paused run a new top to write to.
func (s *Source) SwitchDisk(ctx context.Context, top catalog.Layer) error {
	return s.run.SwitchDisk(ctx, s.keeper.layer(top))
}

// SwitchAtRest gives the run a new top to write to while its guest has frozen its
// file systems.
func (s *Source) SwitchAtRest(ctx context.Context, top catalog.Layer, o capture.FreezeOrder) (capture.Rest, error) {
	answer, err := s.run.SwitchAtRest(ctx, s.keeper.layer(top), &agentv1.FreezeStart{
		LimitMillis: o.Limit.Milliseconds(), AllowHookFailure: o.AllowHookFailure,
	})
	t := answer.GetThawed()
	return capture.Rest{
		Hooks: time.Duration(t.GetHooksNano()), Sync: time.Duration(t.GetSyncNano()), Freeze: time.Duration(t.GetFreezeNano()),
		Switch: time.Duration(answer.GetSwitchNano()), Frozen: time.Duration(t.GetFrozenNano()), HookFailure: t.GetHookFailure(),
	}, err
}

// Boot begins a run of the machine's recorded chain.
func (s *Source) Boot(ctx context.Context) error {
	note, err := s.keeper.Boot(ctx, s.machine)
	if note != "" {
		s.note("%s", note)
	}
	return err
}

// Capture takes memory, CPUs, devices and disk of one instant.
func (s *Source) Capture(ctx context.Context, o capture.CaptureOrder) (capture.CaptureReport, error) {
	top := s.keeper.layer(o.Top)
	answer, err := s.run.Capture(ctx, &monitorv1.CaptureRequest{
		CheckpointId: o.CheckpointID, ParentId: o.ParentID, LayerId: top.ID, LayerPath: top.Path,
		Dir: o.Dir, StayPaused: o.StayPaused,
	})
	if err != nil {
		return capture.CaptureReport{}, err
	}
	p := answer.GetPhases()
	return capture.CaptureReport{
		ChangedPages: answer.GetChangedPages(), Tracking: answer.GetTracking(), Platform: answer.GetPlatform(),
		Phases: capture.Phases{
			Precopy: time.Duration(p.GetPrecopy()), Rounds: int(p.GetRounds()), SyncDisk: time.Duration(p.GetSyncDisk()),
			PrecopiedBytes: p.GetPrecopiedBytes(), WindowBytes: p.GetWindowBytes(),
			Window: machine.WindowTimes{
				Stop: time.Duration(p.GetStop()), Devices: time.Duration(p.GetDevices()), Switch: time.Duration(p.GetSwitch()),
				Pages: time.Duration(p.GetPages()), Resume: time.Duration(p.GetResume()), Downtime: time.Duration(p.GetDowntime()),
			},
		},
	}, nil
}

// SettleCapture tells the run what became of a capture.
func (s *Source) SettleCapture(ctx context.Context, checkpointID string, published, resume bool) (capture.Settled, error) {
	answer, err := s.run.SettleCapture(ctx, checkpointID, published, resume)
	return capture.Settled{Returned: time.Duration(answer.GetReturned()), ClockTrouble: answer.GetClockTrouble()}, err
}

// Disk are the ids of the layers the run has open, lowest first.
func (s *Source) Disk(ctx context.Context) ([]string, error) {
	status, err := s.run.StatusNow(ctx)
	return status.GetDisk(), err
}

// ChangedBytes is what the process has of memory of its own, swapped or not:
// what its guest has changed is in it.
func (s *Source) ChangedBytes() int64 { return ownBytes(s.run.Status().GetQemuPid()) }

// ownBytes is a process's anonymous memory, of RssAnon and VmSwap (proc(5));
// 0 when it cannot be told.
func ownBytes(pid int64) int64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	var kib int64
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		if name != "RssAnon" && name != "VmSwap" {
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
		if err != nil {
			return 0
		}
		kib += n
	}
	return kib << 10
}
