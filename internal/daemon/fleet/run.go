//go:build linux

package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// Run is one run of a machine, reboots of its guest included. Its life: Start
// or Adopt; its monitor may be replaced any number of times; it ends when the
// exit of its process is proven.
type Run struct {
	// ID is the first run id, which its folder is called by.
	ID    string
	dir   string
	files *durable.FS

	mu        sync.Mutex
	machineID string
	client    *monitor.Client
	status    *monitorv1.StatusResponse
	changed   chan struct{}
	ended     bool
	// lost is why it has no monitor and none could be started; nil else.
	lost error
	// wake makes a lost run look for its monitor at once.
	wake chan struct{}
}

// follow keeps the run's status until it has ended or the fleet is closed.
// Without a client it begins by looking for the run's monitor.
func (f *Fleet) follow(run *Run, client *monitor.Client) {
	f.wg.Go(func() {
		for {
			if client == nil {
				var err error
				if client, err = f.successor(run); err != nil {
					if f.ctx.Err() != nil {
						return
					}
					run.set(exitOf(run.dir, err))
					break
				}
			}
			run.replace(client)
			err := run.watch(f.ctx)
			if f.ctx.Err() != nil {
				client.Close()
				return
			}
			if run.exited() {
				client.Close()
				break
			}
			f.cfg.Log.Warn("a monitor is gone, starting its successor", "machine", run.owner(), "run", run.ID, "error", err)
			client.Close()
			client = nil
		}
		f.conclude(run)
	})
}

// conclude tells of the run's end: once before those who wait for it go on, so
// that they find it recorded, and then until it is.
func (f *Fleet) conclude(run *Run) {
	current := f.Current(run.owner()) == run
	told := f.tell(run)
	run.end()
	for wait := 100 * time.Millisecond; !told; wait = min(2*wait, 10*time.Second) {
		select {
		case <-f.ctx.Done():
			return
		case <-time.After(wait):
			told = f.tell(run)
		}
	}
	f.tell(run) // it may have become the current one only now
	if _, err := monitor.ReadConfig(run.dir); errdefs.Is(err, errdefs.NotFound) {
		f.Discard(run.ID) // a killed daemon recorded it and never began it
	} else if !current {
		// Its last monitor may have made them again after others had tidied up.
		// After a current run others tidy up when there is time for it.
		f.remove(f.cfg.Home.RunSockets(run.ID))
	}
}

func (f *Fleet) newRun(machineID, runID, dir string) *Run {
	return &Run{
		machineID: machineID, ID: runID, dir: dir, files: f.cfg.Files, status: &monitorv1.StatusResponse{},
		changed: make(chan struct{}), wake: make(chan struct{}, 1),
	}
}

// watch follows one monitor until its stream ends.
func (r *Run) watch(ctx context.Context) error {
	r.mu.Lock()
	client := r.client
	r.mu.Unlock()
	return client.Watch(ctx, func(status *monitorv1.StatusResponse) error {
		r.set(status)
		return nil
	})
}

// exitOf is the last status of a run whose monitor is gone for good: what its
// record says.
func exitOf(dir string, err error) *monitorv1.StatusResponse {
	status := &monitorv1.StatusResponse{
		Phase: monitorv1.Phase_PHASE_EXITED,
		Exit:  &monitorv1.Exit{Reason: "crashed", Message: err.Error()},
	}
	if record, rerr := monitor.ReadRecord(dir); rerr == nil && record.Exit != nil {
		status.Exit = &monitorv1.Exit{
			Reason: string(record.Exit.Reason), Clean: record.Exit.Clean, Message: record.Exit.Message,
		}
	}
	return status
}

func (r *Run) set(status *monitorv1.StatusResponse) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status = status
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *Run) replace(client *monitor.Client) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.client, r.lost = client, nil
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *Run) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *Run) setLost(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost = why
	close(r.changed)
	r.changed = make(chan struct{})
}

// Lost is why the run has no monitor, so that its state is unknown; nil when
// it has one.
func (r *Run) Lost() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lost
}

func (r *Run) exited() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status.GetPhase() == monitorv1.Phase_PHASE_EXITED
}

// Ended reports whether the run's end is proven.
func (r *Run) Ended() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ended
}

// Status is what its monitor said last.
func (r *Run) Status() *monitorv1.StatusResponse {
	r.mu.Lock()
	defer r.mu.Unlock()
	return proto.CloneOf(r.status)
}

// StatusNow asks its monitor: for what changes all the time, such as CPU time.
func (r *Run) StatusNow(ctx context.Context) (status *monitorv1.StatusResponse, err error) {
	err = r.call(ctx, func(c *monitor.Client) error {
		status, err = c.Status(ctx)
		return err
	})
	return status, err
}

// Await returns when the status satisfies ok. A run that ends before is
// WRONG_STATE. A guest that refuses to be told who it is says of what kind that is.
func (r *Run) Await(ctx context.Context, what string, ok func(*monitorv1.StatusResponse) bool) error {
	for {
		r.mu.Lock()
		status, changed, ended := r.status, r.changed, r.ended
		r.mu.Unlock()
		if ok(status) {
			return nil
		}
		if ended {
			return errdefs.New(errdefs.WrongState, "wait for %s: it ended before (%s)", what, words(status.GetExit()))
		}
		if status.GetRefused() != "" {
			return refusal(status)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			err := fmt.Errorf("wait for %s: %w", what, context.Cause(ctx))
			if trouble := status.GetTrouble(); trouble != "" && !errdefs.Is(err, errdefs.Interrupted) {
				err = fmt.Errorf("%w (%s)", err, trouble)
			}
			return err
		}
	}
}

// AwaitReady returns when the guest has answered and is configured.
func (r *Run) AwaitReady(ctx context.Context) error {
	return r.Await(ctx, "the guest to answer", (*monitorv1.StatusResponse).GetReady)
}

// AwaitLoaded returns when a run that is to wait is loaded.
func (r *Run) AwaitLoaded(ctx context.Context) error {
	return r.Await(ctx, "the run to be loaded", (*monitorv1.StatusResponse).GetWaiting)
}

// AwaitLinked returns when the guest of a run that is to wait has booted and
// answered.
func (r *Run) AwaitLinked(ctx context.Context) error {
	return r.Await(ctx, "the guest to answer", func(s *monitorv1.StatusResponse) bool { return s.GetWaiting() && s.GetLinked() })
}

// AwaitEnd returns when the run's end is proven.
func (r *Run) AwaitEnd(ctx context.Context) error {
	for {
		r.mu.Lock()
		changed, ended := r.changed, r.ended
		r.mu.Unlock()
		if ended {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of run %s: %w", r.ID, context.Cause(ctx))
		}
	}
}

// Monitor is the client of its monitor now; nil while it has none yet.
func (r *Run) Monitor() *monitor.Client {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.client
}

// Agent is the guest agent, through the monitor.
func (r *Run) Agent() agentv1connect.AgentServiceClient { return r.Monitor().Agent() }

// Dir is the run's folder.
func (r *Run) Dir() string { return r.dir }

// call asks the monitor for something that may be repeated; when the monitor
// dies over it, its successor is asked again.
func (r *Run) call(ctx context.Context, ask func(*monitor.Client) error) error {
	for {
		client := r.Monitor()
		err := monitor.ErrGone
		if client != nil {
			err = ask(client)
		}
		if !errors.Is(err, monitor.ErrGone) {
			return err
		}
		for r.Monitor() == client {
			r.mu.Lock()
			changed, ended, lost := r.changed, r.ended, r.lost
			r.mu.Unlock()
			if lost != nil && !ended {
				return errdefs.New(errdefs.OutcomeUnknown, "the run's monitor cannot be reached (%w); end the machine with holdpoint stop --force", lost)
			}
			if ended {
				return errdefs.New(errdefs.WrongState, "the run has ended (%s)", Describe(r.Status().GetExit()))
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return fmt.Errorf("wait for the successor of a monitor: %w", context.Cause(ctx))
			}
		}
	}
}

// Pause stops the vCPUs on a user's word.
func (r *Run) Pause(ctx context.Context) error {
	return r.call(ctx, func(c *monitor.Client) error { return c.Pause(ctx) })
}

// Resume lets the vCPUs go.
func (r *Run) Resume(ctx context.Context) error {
	return r.call(ctx, func(c *monitor.Client) error { return c.Resume(ctx) })
}

// SwitchDisk gives the paused run a new top to write to.
func (r *Run) SwitchDisk(ctx context.Context, top machine.Layer) error {
	return r.call(ctx, func(c *monitor.Client) error { return c.SwitchDisk(ctx, top) })
}

// ReplaceLayers puts a merged layer in the place of several of the disk.
func (r *Run) ReplaceLayers(ctx context.Context, firstID, lastID string, merged machine.Layer) error {
	return r.call(ctx, func(c *monitor.Client) error { return c.ReplaceLayers(ctx, firstID, lastID, merged) })
}

// Stop asks the guest to shut down and returns when the run has ended; clean
// is whether the guest said so and the process exited by itself. DEADLINE
// means that the guest did not stop in time and goes on.
func (r *Run) Stop(ctx context.Context, timeout time.Duration) (clean bool, err error) {
	err = r.call(ctx, func(c *monitor.Client) error {
		_, err := c.Shutdown(ctx, timeout)
		return err
	})
	if err != nil && !r.exited() {
		return false, err
	}
	if err := r.AwaitEnd(ctx); err != nil {
		return false, err
	}
	return r.Status().GetExit().GetClean(), nil
}

// Kill ends the run as a power cut would; it returns when the end is proven.
func (r *Run) Kill(ctx context.Context) error {
	if r.Lost() != nil {
		// Nobody else can end it: by the mark of its processes.
		if err := monitor.KillRun(ctx, r.files, r.dir); err != nil {
			return err
		}
		select {
		case r.wake <- struct{}{}:
		default:
		}
		return r.AwaitEnd(ctx)
	}
	err := r.call(ctx, func(c *monitor.Client) error {
		_, err := c.Kill(ctx)
		return err
	})
	if err != nil && !r.exited() {
		return err
	}
	return r.AwaitEnd(ctx)
}
