//go:build linux

// Package keeper boots, adopts, pauses and ends the runs of machines and keeps
// the catalog in step with them. Which verb wants it and who may is decided
// elsewhere.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// bootTimeout is how long a guest may take from the start of its process to
// its first answer. Under TCG on a busy host it takes 5 to 20 s.
const bootTimeout = 2 * time.Minute

// recordTimeout bounds a record that is made after the fact.
const recordTimeout = 30 * time.Second

// adoptTimeout is how long the start of a daemon waits for the monitor of one
// machine; it takes 0.1 to 0.3 s to find one or to start a successor.
const adoptTimeout = 5 * time.Second

// CleanExit is a machine's exit after its guest had shut down cleanly.
const CleanExit = "clean shutdown"

// Boot is what a run boots from.
type Boot struct {
	Kernel, Initramfs string
	// Accelerator is "kvm" or "tcg".
	Accelerator string
	// Note says why it is a slower one than the host seems to offer; empty
	// when there is nothing to say, or it was said before.
	Note string
}

// Booter prepares boots.
type Booter interface {
	// PrepareBoot checks the image's files against its build id and makes
	// what a boot needs besides.
	PrepareBoot(ctx context.Context, img image.Image) (Boot, error)
}

// Config is what a Keeper works with.
type Config struct {
	Home    *home.Home
	Files   *durable.FS
	Catalog *catalog.Catalog
	Gates   *hold.Gates
	Booter  Booter
	// MonitorCommand is the hidden verb's program and first arguments.
	MonitorCommand []string
	Build          string
	Log            *slog.Logger
}

// Keeper keeps the runs of all machines. Close lets go of them.
type Keeper struct {
	cfg   Config
	fleet *fleet.Fleet

	mu sync.Mutex
	// beside are runs that were begun beside a machine's current one.
	beside map[string]*fleet.Run
}

// New returns a Keeper that has adopted nothing yet.
func New(cfg Config) *Keeper {
	k := &Keeper{cfg: cfg, beside: map[string]*fleet.Run{}}
	k.fleet = fleet.New(fleet.Config{
		Home: cfg.Home, Files: cfg.Files, MonitorCommand: cfg.MonitorCommand, Log: cfg.Log, Exited: k.exited,
	})
	return k
}

// Close lets go of all runs; they go on.
func (k *Keeper) Close() { k.fleet.Close() }

// Run is the machine's current run; nil when it has none.
func (k *Keeper) Run(machineID string) *fleet.Run { return k.fleet.Current(machineID) }

// Running is the machine's current run, if commands can be run in it. The
// error names the verb, the machine and its state.
func (k *Keeper) Running(m catalog.Machine, verb string) (*fleet.Run, error) {
	run := k.Run(m.ID)
	switch state := State(m, run); state {
	case machine.Running:
		return run, nil
	case machine.Paused:
		return nil, errdefs.New(errdefs.WrongState, "%s: machine %s is paused; run holdpoint resume %s", verb, m.Name, m.Name)
	case machine.Suspended:
		return nil, errdefs.New(errdefs.WrongState, "%s: machine %s is suspended; run holdpoint resume %s", verb, m.Name, m.Name)
	case machine.Unknown:
		return nil, errdefs.New(errdefs.WrongState, "%s: the state of machine %s is unknown (%s); end it with holdpoint stop --force %s, or look into holdpoint inspect %s", verb, m.Name, whyUnknown(run), m.Name, m.Name)
	default:
		return nil, errdefs.New(errdefs.WrongState, "%s: machine %s is %s; run holdpoint start %s", verb, m.Name, state, m.Name)
	}
}

// whyUnknown says why a machine's state is unknown.
func whyUnknown(run *fleet.Run) string {
	if run == nil {
		return "it has no run, and its end is not recorded yet"
	}
	if err := run.Lost(); err != nil {
		return err.Error()
	}
	return "look again"
}

// State is a machine's lifecycle state: what its run says, else what is recorded.
func State(m catalog.Machine, run *fleet.Run) machine.State {
	switch {
	case m.State == machine.Creating:
		return m.State
	case run == nil && (m.State == machine.Running || m.State == machine.Paused):
		return machine.Unknown // it should have a run
	case run == nil:
		return m.State
	case run.Lost() != nil && !run.Ended():
		return machine.Unknown
	}
	switch run.Status().GetPhase() {
	case monitorv1.Phase_PHASE_USER_PAUSED:
		return machine.Paused
	case monitorv1.Phase_PHASE_EXITED:
		return machine.Stopped
	}
	return machine.Running
}

// ExitOf is a run's exit as a machine records it.
func ExitOf(exit *monitorv1.Exit) string {
	if exit.GetClean() {
		return CleanExit
	}
	return fleet.Describe(exit)
}

// exited records the end of a machine's current run, and reports whether it did.
func (k *Keeper) exited(machineID string, run *fleet.Run) bool {
	ctx, cancel := context.WithTimeout(context.Background(), recordTimeout)
	defer cancel()
	reason := ExitOf(run.Status().GetExit())
	k.cfg.Log.Info("run ended", "machine", machineID, "run", run.ID, "exit", reason)
	err := k.cfg.Catalog.EndRun(ctx, machineID, run.ID, machine.Stopped, reason)
	if err != nil && !errdefs.Is(err, errdefs.WrongState) && !errdefs.Is(err, errdefs.NotFound) {
		k.cfg.Log.Error("record the end of a run", "machine", machineID, "error", err)
		return false
	}
	// An operation tidies up when the guest is back: each removal is synced,
	// and until then the machine stands still.
	if m, err := k.cfg.Catalog.GetMachine(ctx, machineID); err == nil && m.HeldBy == "" {
		k.fleet.Tidy(machineID)
	}
	return true
}

// Tidy removes what ended runs of a machine that is stopped left behind.
func (k *Keeper) Tidy(machineID string) { k.fleet.Tidy(machineID) }

// Sweep removes what ended runs left behind of all machines that no operation
// holds: those that a restore replaced, or whose monitor died, end unheard of.
func (k *Keeper) Sweep(ctx context.Context) error {
	machines, err := k.cfg.Catalog.ListMachines(ctx)
	if err != nil {
		return err
	}
	for _, m := range machines {
		if m.HeldBy == "" {
			k.fleet.Tidy(m.ID, m.RunID)
		}
	}
	return nil
}

// Adopt takes hold of what an earlier daemon left running of the machine, or
// records that it has ended meanwhile.
func (k *Keeper) Adopt(ctx context.Context, m catalog.Machine) error {
	k.cfg.Gates.SetGeneration(m.ID, m.Generation)
	if m.RunID == "" || m.Exit != "" {
		return nil // it never ran, or the end of its last run is recorded
	}
	adopting, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	run := k.fleet.Adopt(adopting, m.ID, m.RunID)
	k.fleet.SetCurrent(m.ID, run)
	if err := run.Lost(); err != nil {
		return fmt.Errorf("adopt machine %s: %w", m.Name, err)
	}
	return nil
}

// Boot begins a run of the machine's recorded chain and returns when its guest
// has answered. When it does not, nothing is left running.
func (k *Keeper) Boot(ctx context.Context, machineID string) (note string, err error) {
	m, err := k.cfg.Catalog.GetMachine(ctx, machineID)
	if err != nil {
		return "", err
	}
	chain, err := k.cfg.Catalog.Chain(ctx, m.ID)
	if err != nil {
		return "", err
	}
	runID := durable.NewID()
	run, note, err := k.begin(ctx, m, runID, chain, func() error {
		return k.cfg.Catalog.BeginRun(ctx, m.ID, runID)
	})
	if err == nil {
		k.fleet.SetCurrent(m.ID, run)
		err = k.cfg.Catalog.SetMachineState(ctx, m.ID, machine.Running)
	}
	if err != nil {
		return "", fmt.Errorf("boot machine %s: %w", m.Name, errors.Join(err, k.bootFailed(ctx, m, runID, err)))
	}
	k.fleet.Tidy(m.ID, runID)
	return note, nil
}

func (k *Keeper) bootFailed(ctx context.Context, m catalog.Machine, runID string, cause error) error {
	if m.State == machine.Creating {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTimeout)
	defer cancel()
	err := k.cfg.Catalog.EndRun(ctx, m.ID, runID, machine.Stopped, "did not boot: "+cause.Error())
	if errdefs.Is(err, errdefs.WrongState) {
		return nil // the failure came before the run was recorded
	}
	return err
}

// begin starts a run and waits for its guest. record is called before
// anything may be written to the chain's top.
func (k *Keeper) begin(ctx context.Context, m catalog.Machine, runID string, chain []catalog.Layer, record func() error) (*fleet.Run, string, error) {
	cfg, note, err := k.config(ctx, m, runID, chain)
	if err != nil {
		return nil, "", err
	}
	if err := record(); err != nil {
		return nil, "", err
	}
	run, err := k.fleet.Start(ctx, cfg)
	if err != nil {
		return nil, "", err
	}
	ready, cancel := context.WithTimeoutCause(ctx, bootTimeout,
		errdefs.New(errdefs.Deadline, "the guest did not answer within %s; its console is in holdpoint logs %s", bootTimeout, m.Name))
	defer cancel()
	if err := run.AwaitReady(ready); err != nil {
		end, stop := context.WithTimeout(context.WithoutCancel(ctx), recordTimeout)
		defer stop()
		return nil, "", errors.Join(err, run.Kill(end))
	}
	return run, note, nil
}
