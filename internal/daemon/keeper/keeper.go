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
	"github.com/holdpoint/holdpoint/internal/cgroup"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/diskchain"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// bootTimeout is how long a guest may take from the start of its process to
// its first answer. Under TCG on a busy host it takes 5 to 20 s.
const bootTimeout = 2 * time.Minute

// recordTimeout bounds a record that is made after the fact.
const recordTimeout = 30 * time.Second

// adoptTimeout is how long the start of a daemon waits for the monitor of one
// machine; it takes 0.1 to 0.3 s to find one or to start a successor.
const adoptTimeout = 5 * time.Second

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
	// Platform is what a run of the config is made of here.
	Platform(ctx context.Context, cfg machine.RunConfig) (machine.Platform, error)
}

// Chains turns the recorded layers of a disk into the files that a run opens.
type Chains interface {
	Open(ctx context.Context, root machine.Layer, layers []catalog.Layer) ([]machine.Layer, error)
	// Check gives up merged files that stand for the layers and are damaged.
	Check(ctx context.Context, layers []catalog.Layer) error
	// Shorten merges layers that a run has open, if that is worth it now, and
	// has the merged one put in their place.
	Shorten(ctx context.Context, root machine.Layer, layers []catalog.Layer, open []string, replace func(diskchain.Replacement) error) (shorter bool, err error)
}

// Config is what a Keeper works with.
type Config struct {
	Home    *home.Home
	Files   *durable.FS
	Catalog *catalog.Catalog
	Gates   *hold.Gates
	Booter  Booter
	Chains  Chains
	Groups  *cgroup.Tree
	Memory  restore.MemoryFiles
	// MonitorCommand is the hidden verb's program and first arguments.
	MonitorCommand []string
	Build          string
	Log            *slog.Logger
	// Ended, which may be nil, is called when the end of a machine's run was
	// recorded and no operation holds the machine.
	Ended func(machineID string)
}

// Keeper keeps the runs of all machines. Close lets go of them.
type Keeper struct {
	cfg   Config
	fleet *fleet.Fleet

	mu sync.Mutex
	// beside are runs that are no machine's current one: those that were begun
	// beside it, and those that are nobody's yet.
	beside map[string]*fleet.Run
	// undecided are the machines of which an operation records the end of the
	// run itself; the run is there once it has ended.
	undecided map[string]*fleet.Run
}

// New returns a Keeper that has adopted nothing yet.
func New(cfg Config) *Keeper {
	k := &Keeper{cfg: cfg, beside: map[string]*fleet.Run{}, undecided: map[string]*fleet.Run{}}
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
	state := State(m, run)
	if state == machine.Unknown {
		return nil, errdefs.New(errdefs.WrongState, "%s: the state of machine %s is unknown (%s); end it with holdpoint stop --force %s, or look into holdpoint inspect %s", verb, m.Name, whyUnknown(run), m.Name, m.Name)
	}
	if err := machine.Allow(verb, m.Name, state, machine.Running); err != nil {
		return nil, err
	}
	return run, nil
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
	k.mu.Lock()
	if _, undecided := k.undecided[machineID]; undecided {
		k.undecided[machineID] = run
		k.mu.Unlock()
		return true
	}
	k.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), recordTimeout)
	defer cancel()
	if m, err := k.cfg.Catalog.GetMachine(ctx, machineID); err == nil && m.State == machine.Creating {
		return false // whoever makes it, or settles that, removes it or makes it run
	}
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
		if k.cfg.Ended != nil {
			k.cfg.Ended(machineID)
		}
	}
	return true
}

// DecideEnd leaves it to the caller what the end of the machine's run means,
// until done is called: what is not recorded by then is recorded as a stop.
func (k *Keeper) DecideEnd(machineID string) (done func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.undecided[machineID] = nil
	return func() {
		k.mu.Lock()
		run := k.undecided[machineID]
		delete(k.undecided, machineID)
		k.mu.Unlock()
		if run == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), recordTimeout)
		defer cancel()
		if m, err := k.cfg.Catalog.GetMachine(ctx, machineID); err == nil && m.Exit == "" && m.RunID == run.ID {
			k.exited(machineID, run)
		}
	}
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
	k.cfg.Groups.Sweep()
	for _, m := range machines {
		switch {
		case m.HeldBy != "":
		case m.State == machine.Stopped || m.State == machine.Suspended:
			k.fleet.Tidy(m.ID) // its run ended while an operation held it
		default:
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
	return k.boot(ctx, machineID, false)
}

// BootUnconfigured is Boot up to where the guest answers and was not told who
// it is: Activate goes on from there.
func (k *Keeper) BootUnconfigured(ctx context.Context, machineID string) (note string, err error) {
	return k.boot(ctx, machineID, true)
}

func (k *Keeper) boot(ctx context.Context, machineID string, wait bool) (note string, err error) {
	m, err := k.cfg.Catalog.GetMachine(ctx, machineID)
	if err != nil {
		return "", err
	}
	chain, err := k.cfg.Catalog.Chain(ctx, m.ID)
	if err != nil {
		return "", err
	}
	l := launch{machine: m, wait: wait, Launch: restore.Launch{RunID: durable.NewID(), Chain: chain}}
	l.record = func() error { return k.cfg.Catalog.BeginRun(ctx, m.ID, l.RunID) }
	run, begun, err := k.begin(ctx, l)
	if err == nil {
		k.fleet.SetCurrent(m.ID, run)
		if !wait {
			err = k.cfg.Catalog.SetMachineState(ctx, m.ID, machine.Running)
		}
	}
	if err != nil {
		return "", fmt.Errorf("boot machine %s: %w", m.Name, errors.Join(err, k.bootFailed(ctx, m, l.RunID, err)))
	}
	k.fleet.Tidy(m.ID, l.RunID)
	return begun.Note, nil
}

// Activate tells the guest of a machine whose run waits who it is, and returns
// when the machine runs.
func (k *Keeper) Activate(ctx context.Context, machineID string) error {
	m, err := k.cfg.Catalog.GetMachine(ctx, machineID)
	if err != nil {
		return err
	}
	run := k.Run(m.ID)
	if run == nil {
		return errdefs.New(errdefs.WrongState, "activate machine %s: it has no run", m.Name)
	}
	if err := k.activate(ctx, m, run); err != nil {
		return err
	}
	if err := k.awaitGuest(ctx, m, run, run.AwaitReady); err != nil {
		return fmt.Errorf("activate machine %s: %w", m.Name, err)
	}
	return k.cfg.Catalog.SetMachineState(ctx, m.ID, machine.Running)
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

// begin starts a run and waits for its guest. On error nothing of it runs.
func (k *Keeper) begin(ctx context.Context, l launch) (*fleet.Run, restore.Begun, error) {
	began := time.Now()
	run, begun, err := k.start(ctx, l)
	if err != nil {
		return nil, begun, err
	}
	begun.Running = time.Since(began)
	await := run.AwaitReady
	switch {
	case l.wait && l.Incoming == nil:
		await = run.AwaitLinked
	case l.wait:
		await = run.AwaitLoaded
	}
	if err := k.awaitGuest(ctx, l.machine, run, await); err != nil {
		return nil, begun, err
	}
	begun.Answer, begun.ClosedSockets = time.Since(began), int(run.Status().GetClosedSockets())
	return run, begun, nil
}

// start starts a run, or lets one go that waits.
func (k *Keeper) start(ctx context.Context, l launch) (*fleet.Run, restore.Begun, error) {
	if l.Standby {
		k.mu.Lock()
		run := k.beside[l.RunID]
		k.mu.Unlock()
		if run == nil {
			return nil, restore.Begun{}, errdefs.New(errdefs.NotFound, "activate standby %s: it is not known; try again", l.RunID)
		}
		if err := k.limit(l, run); err != nil {
			return nil, restore.Begun{}, err
		}
		return run, restore.Begun{}, k.activate(ctx, l.machine, run)
	}
	cfg, note, err := k.config(ctx, l)
	if err != nil {
		return nil, restore.Begun{}, err
	}
	if l.record != nil {
		if err := l.record(); err != nil {
			return nil, restore.Begun{}, err
		}
	}
	run, err := k.fleet.Start(ctx, cfg)
	return run, restore.Begun{Note: note}, err
}
