//go:build linux

package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
)

// Run is one run of a machine, reboots of its guest included. Its life: Start
// or Adopt; its monitor may be replaced any number of times; it ends when the
// exit of its process is proven.
type Run struct {
	machineID string
	// ID is the first run id, which its folder is called by.
	ID  string
	dir string

	mu      sync.Mutex
	client  *monitor.Client
	status  *monitorv1.StatusResponse
	changed chan struct{}
	ended   bool
	// lost: its monitor died and no successor could be started yet.
	lost bool
}

// follow keeps the run's status until it has ended or the fleet is closed.
func (f *Fleet) follow(machineID, runID, dir string, client *monitor.Client) *Run {
	run := &Run{
		machineID: machineID, ID: runID, dir: dir, client: client,
		status: &monitorv1.StatusResponse{}, changed: make(chan struct{}),
	}
	f.wg.Go(func() {
		for {
			err := run.watch(f.ctx)
			if f.ctx.Err() != nil {
				run.closeClient()
				return
			}
			if run.exited() {
				break
			}
			f.cfg.Log.Warn("a monitor is gone, starting its successor", "machine", machineID, "run", runID, "error", err)
			run.closeClient()
			next, err := f.successor(run)
			if f.ctx.Err() != nil {
				return
			}
			if err != nil {
				run.set(exitOf(dir, err))
				break
			}
			run.replace(next)
		}
		// Who waits for the end finds it recorded; a run that is made the
		// current one only now is told of right after.
		f.ended(run)
		run.end()
		run.closeClient()
		f.ended(run)
	})
	return run
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
	r.client, r.lost = client, false
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *Run) closeClient() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.client.Close()
}

func (r *Run) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *Run) setLost() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost = true
}

// Lost reports whether the run has no monitor and none could be started: its
// state is unknown until one is.
func (r *Run) Lost() bool {
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

// Await returns when the status satisfies ok. A run that ends before is
// WRONG_STATE.
func (r *Run) Await(ctx context.Context, what string, ok func(*monitorv1.StatusResponse) bool) error {
	for {
		r.mu.Lock()
		status, changed, ended := r.status, r.changed, r.ended
		r.mu.Unlock()
		if ok(status) {
			return nil
		}
		if ended {
			return errdefs.New(errdefs.WrongState, "wait for %s: the run ended (%s)", what, Describe(status.GetExit()))
		}
		select {
		case <-changed:
		case <-ctx.Done():
			err := fmt.Errorf("wait for %s: %w", what, context.Cause(ctx))
			if trouble := status.GetTrouble(); trouble != "" {
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

// Monitor is the client of its monitor now.
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
		err := ask(client)
		if !errors.Is(err, monitor.ErrGone) {
			return err
		}
		for r.Monitor() == client {
			r.mu.Lock()
			changed, ended := r.changed, r.ended
			r.mu.Unlock()
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
	err := r.call(ctx, func(c *monitor.Client) error {
		_, err := c.Kill(ctx)
		return err
	})
	if err != nil && !r.exited() {
		return err
	}
	return r.AwaitEnd(ctx)
}

// Describe says how a run ended, for people.
func Describe(exit *monitorv1.Exit) string {
	if exit == nil {
		return "reason unknown"
	}
	if exit.GetMessage() != "" {
		return exit.GetReason() + ": " + exit.GetMessage()
	}
	return exit.GetReason()
}

func newestFirst(infos []os.FileInfo) []os.FileInfo {
	slices.SortFunc(infos, func(a, b os.FileInfo) int { return cmp.Compare(b.ModTime().UnixNano(), a.ModTime().UnixNano()) })
	return infos
}
