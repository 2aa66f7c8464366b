//go:build linux

package qemu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/blocks"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qemu/process"
	"github.com/holdpoint/holdpoint/internal/qemu/reach"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

// run is a machine.Run of one QEMU process. Its life: newRun, with two
// goroutines, one that waits for the exit and one that keeps the logs small;
// both end with the exit or with Close.
type run struct {
	log  *slog.Logger
	cfg  machine.RunConfig
	proc *process.Process
	host *host.Host
	// within is what the process may reach.
	within *reach.Reach
	// disk is changed by whoever holds changing.
	disk   *blocks.Disk
	exited chan struct{}
	// life ends with the exit or Close, by stop; tasks are over then too.
	life  context.Context
	stop  context.CancelFunc
	tasks sync.WaitGroup
	// changing is a semaphore around what changes the run's state or its block
	// nodes; dialing one around reconnecting.
	changing, dialing chan struct{}

	mu     sync.Mutex
	client *qmp.Client
	killed bool
	closed bool
	exit   machine.Exit
}

func newRun(q *QEMU, cfg machine.RunConfig, within *reach.Reach, p *process.Process, client *qmp.Client) *run {
	life, stop := context.WithCancel(context.Background())
	r := &run{
		log: q.log.With("run", cfg.RunID), cfg: cfg, proc: p, host: q.host, within: within,
		exited: make(chan struct{}), life: life, stop: stop,
		changing: make(chan struct{}, 1), dialing: make(chan struct{}, 1),
		client: client,
	}
	r.disk = &blocks.Disk{RunID: cfg.RunID, Execute: r.execute, Reach: within}
	r.tasks.Go(r.watch)
	r.tasks.Go(func() { r.keepLogs(life) })
	return r
}

// spawn runs f as one of the tasks for which Close waits; false after Close.
func (r *run) spawn(f func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.tasks.Go(f)
	}
	return !r.closed
}

// Adopt is that of machine.Hypervisor. Beside NOT_FOUND it fails with CONFLICT
// when another process than p answers at the run's socket.
func (q *QEMU) Adopt(ctx context.Context, cfg machine.RunConfig, p machine.Process) (machine.Run, error) {
	proc, err := process.Open(p.PID)
	if err == nil && proc.ID() != p {
		err = errors.Join(process.ErrGone, proc.Close())
	}
	if errors.Is(err, process.ErrGone) {
		return nil, errdefs.New(errdefs.NotFound, "adopt run %s: its process %d has ended", cfg.RunID, p.PID)
	}
	if err != nil {
		return nil, fmt.Errorf("adopt run %s: %w", cfg.RunID, err)
	}
	client, err := dialQMP(ctx, cfg, p.PID)
	if err != nil {
		defer proc.Close()
		if ctx.Err() == nil && proc.AwaitEnd(exitGrace) {
			return nil, errdefs.New(errdefs.NotFound, "adopt run %s: its process %d has ended", cfg.RunID, p.PID)
		}
		return nil, fmt.Errorf("adopt run %s: %w", cfg.RunID, err)
	}
	return newRun(q, cfg, reach.Open(cfg.Dir), proc, client), nil
}

// dialQMP connects to the run's QMP socket, on which pid must be listening.
func dialQMP(ctx context.Context, cfg machine.RunConfig, pid int) (*qmp.Client, error) {
	conn, err := process.DialPeer(ctx, filepath.Join(cfg.SocketDir, qmpSocket), pid)
	if err != nil {
		return nil, err
	}
	return qmp.Connect(ctx, conn)
}

// Isolation is that of machine.Isolated.
func (r *run) Isolation() machine.Isolation { return r.within.Isolation() }

// Process is that of machine.Run.
func (r *run) Process() machine.Process { return r.proc.ID() }

// Pause is that of machine.Run.
func (r *run) Pause(ctx context.Context) error { return r.change(ctx, "pause", "stop") }

// Resume is that of machine.Run. QEMU also pauses by itself, when the host's
// disk is full; Resume then tries the write again.
func (r *run) Resume(ctx context.Context) error { return r.change(ctx, "resume", "cont") }

func (r *run) change(ctx context.Context, verb, command string) error {
	release, err := r.enter(ctx, verb)
	if err != nil {
		return err
	}
	defer release()
	return r.execute(ctx, verb, command, nil, nil)
}

// Running is that of machine.Run.
func (r *run) Running(ctx context.Context) (bool, error) {
	var status struct{ Running bool }
	err := r.execute(ctx, "look at", "query-status", nil, &status)
	return status.Running, err
}

// SwitchDisk is that of machine.Run. Switching to the layer that already is the
// top changes nothing. The caller syncs the old top's file before it pauses,
// for QEMU flushes it here, inside the window. OUTCOME_UNKNOWN when QEMU did not
// say in time which layer is the top.
func (r *run) SwitchDisk(ctx context.Context, top machine.Layer) error {
	const verb = "switch disk of"
	release, err := r.enter(ctx, verb)
	if err != nil {
		return err
	}
	defer release()
	running, err := r.Running(ctx)
	if err != nil {
		return err
	}
	if running {
		return errdefs.New(errdefs.WrongState, "%s run %s: it is running; pause it first", verb, r.cfg.RunID)
	}
	if err = r.disk.Switch(ctx, top); err != nil {
		return cmp.Or(r.usable(verb), err)
	}
	return nil
}

// SwitchAtRest is that of machine.Run.
func (r *run) SwitchAtRest(ctx context.Context, top machine.Layer, atRest machine.AtRest) (switched bool, err error) {
	const verb = "switch disk of"
	release, err := r.enter(ctx, verb)
	if err != nil {
		return false, err
	}
	defer release()
	if switched, err = r.disk.SwitchAtRest(ctx, top, atRest); err != nil {
		err = cmp.Or(r.usable(verb), err)
	}
	return switched, err
}

// ReplaceLayers is that of machine.Run.
func (r *run) ReplaceLayers(ctx context.Context, chain []machine.Layer, from, to int, merged machine.Layer) error {
	release, err := r.enter(ctx, "replace layers of")
	if err != nil {
		return err
	}
	defer release()
	return r.disk.Replace(ctx, chain, from, to, merged)
}

// DialLink is that of machine.Run. QEMU accepts the next connection when the
// one before is closed; until then what is written to it waits.
func (r *run) DialLink(ctx context.Context) (net.Conn, error) {
	if err := r.usable("dial link of"); err != nil {
		return nil, err
	}
	conn, err := process.Dial(ctx, filepath.Join(r.cfg.SocketDir, linkSocket))
	if err != nil {
		return nil, r.explain(ctx, "dial link of", err)
	}
	return conn, nil
}

// DialNetwork is that of machine.Networked.
func (r *run) DialNetwork(ctx context.Context) (net.Conn, error) {
	if err := r.usable("dial network of"); err != nil {
		return nil, err
	}
	conn, err := process.Dial(ctx, filepath.Join(r.cfg.SocketDir, netSocket))
	if err != nil {
		return nil, r.explain(ctx, "dial network of", err)
	}
	return conn, nil
}

// Kill is that of machine.Run.
func (r *run) Kill(ctx context.Context) error {
	if err := r.usable("kill"); err != nil {
		return err
	}
	r.mu.Lock()
	r.killed = true
	r.mu.Unlock()
	// For a successor, should we die before the exit is recorded. Without it
	// the end is called a crash, which is wrong but not unsafe.
	_ = os.WriteFile(filepath.Join(r.cfg.Dir, killFile), nil, 0o600)
	if err := r.proc.Signal(unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("kill run %s: %w", r.cfg.RunID, err)
	}
	select {
	case <-r.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kill run %s: exit not proven: %w", r.cfg.RunID, ctx.Err())
	}
}

// Exited is that of machine.Run.
func (r *run) Exited() <-chan struct{} { return r.exited }

// Exit is that of machine.Run.
func (r *run) Exit() machine.Exit {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.exit
}

// Close is that of machine.Run. It may be called more than once.
func (r *run) Close() error {
	r.mu.Lock()
	r.closed = true
	client := r.client
	r.mu.Unlock()
	r.stop()
	err := client.Close()
	if cerr := r.proc.Close(); cerr != nil && !errors.Is(cerr, os.ErrClosed) {
		err = errors.Join(err, cerr)
	}
	r.tasks.Wait()
	return err
}

// usable refuses a run that has ended or was let go of.
func (r *run) usable(verb string) error {
	select {
	case <-r.exited:
		return errdefs.New(errdefs.WrongState, "%s run %s: it has ended (%s)", verb, r.cfg.RunID, r.Exit().Reason)
	default:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errdefs.New(errdefs.WrongState, "%s run %s: it was let go of", verb, r.cfg.RunID)
	}
	return nil
}

// enter waits for the run's turn to be changed.
func (r *run) enter(ctx context.Context, verb string) (release func(), err error) {
	select {
	case r.changing <- struct{}{}:
		return func() { <-r.changing }, nil
	case <-r.exited:
		return nil, r.usable(verb)
	case <-ctx.Done():
		return nil, fmt.Errorf("%s run %s: %w", verb, r.cfg.RunID, ctx.Err())
	}
}

// execute runs one command; verb says for people what it is for.
func (r *run) execute(ctx context.Context, verb, command string, args, result any) error {
	client, err := r.connected(ctx, verb)
	if err != nil {
		return err
	}
	return r.explain(ctx, verb, client.Execute(ctx, command, args, result))
}

func (r *run) current() *qmp.Client {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.client
}

// connected returns the client, a new one if the connection broke.
func (r *run) connected(ctx context.Context, verb string) (*qmp.Client, error) {
	select {
	case r.dialing <- struct{}{}:
		defer func() { <-r.dialing }()
	case <-ctx.Done():
		return nil, fmt.Errorf("%s run %s: %w", verb, r.cfg.RunID, ctx.Err())
	}
	if err := r.usable(verb); err != nil {
		return nil, err
	}
	client := r.current()
	if client.Err() == nil {
		return client, nil
	}
	client, err := dialQMP(ctx, r.cfg, r.proc.ID().PID)
	if err != nil {
		return nil, r.explain(ctx, verb, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		_ = client.Close()
		return nil, errdefs.New(errdefs.WrongState, "%s run %s: it was let go of", verb, r.cfg.RunID)
	}
	r.client = client
	return client, nil
}

// explain says what a failed command or connection means for the run. A broken
// connection is mostly an exit that is about to be proven.
func (r *run) explain(ctx context.Context, verb string, err error) error {
	if err == nil {
		return nil
	}
	var refused *qmp.Error
	if !errors.As(err, &refused) && ctx.Err() == nil {
		timer := time.NewTimer(exitGrace)
		defer timer.Stop()
		select {
		case <-r.exited:
		case <-ctx.Done():
		case <-timer.C:
		}
	}
	if gone := r.usable(verb); gone != nil {
		return gone
	}
	return fmt.Errorf("%s run %s: %w", verb, r.cfg.RunID, err)
}
