//go:build linux

package qemu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/blocks"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

const windowVerb = "open window of"

// resumeGrace is how long after ctx's end QEMU may take to say that the vCPUs
// run again, before that is called unknown. It takes 2 ms.
const resumeGrace = time.Second

// stateSet is the fd set in which QEMU finds the file for the device state,
// statePath what it opens then.
const (
	stateSet  = 1
	statePath = "/dev/fdset/1"
)

// The commands of a window, in the order in which they are sent.
const (
	commandStop   = "stop"
	commandSave   = "xen-save-devices-state"
	commandSwitch = "blockdev-snapshot"
)

// window is one call of Window. Its life: prepare, while the guest runs; open,
// from the command to stop to the last answer; resume, whatever happened;
// settle, while the guest runs again.
type window struct {
	r *run
	machine.Window
	// top is the block node that is switched from; empty for no switch.
	top      string
	cmds     []qmp.Command
	start    time.Time
	times    machine.WindowTimes
	switched bool
}

// Window is that of machine.Run. UNSUPPORTED where this QEMU cannot save its
// devices alone, WRONG_STATE unless w.WasPaused says what the run is. Only the
// commands to stop, to save and to switch are between ctx and its deadline:
// the vCPUs are let go by then, or as soon as QEMU answers again, also if
// that is after OUTCOME_UNKNOWN was returned. It returns only after w.Pages has.
func (r *run) Window(ctx context.Context, w machine.Window) (machine.WindowTimes, error) {
	release, err := r.enter(ctx, windowVerb)
	if err != nil {
		return machine.WindowTimes{}, err
	}
	o := &window{r: r, Window: w}
	if err := o.prepare(ctx); err != nil {
		release()
		return machine.WindowTimes{}, err
	}
	err = o.open(ctx)
	if !o.WasPaused && (err != nil || !o.StayPaused) {
		if unknown := o.resume(ctx, release); unknown != nil {
			return o.times, unknown
		}
	}
	o.settle()
	release()
	return o.times, r.reason(ctx, err)
}

// prepare does all that need not be done while the vCPUs stand still.
func (o *window) prepare(ctx context.Context) error {
	r := o.r
	if err := r.canSave(ctx); err != nil {
		return err
	}
	running, err := r.Running(ctx)
	if err != nil {
		return err
	}
	if running == o.WasPaused {
		state := map[bool]string{true: "running", false: "paused"}[running]
		return errdefs.New(errdefs.WrongState, "%s run %s: it is %s already", windowVerb, r.cfg.RunID, state)
	}
	if !o.WasPaused {
		o.cmds = append(o.cmds, qmp.Command{Name: commandStop})
	}
	o.cmds = append(o.cmds, qmp.Command{
		Name: commandSave,
		Args: map[string]any{"filename": statePath, "live": false},
	})
	if err := o.prepareSwitch(ctx); err != nil {
		return err
	}
	if err := o.passState(ctx); err != nil {
		o.settle()
		return err
	}
	return nil
}

// prepareSwitch adds the new top's node.
func (o *window) prepareSwitch(ctx context.Context) error {
	if o.Top == nil {
		return nil
	}
	old, err := o.r.disk.Prepare(ctx, windowVerb, *o.Top)
	if err != nil || old == "" {
		return err
	}
	o.top = old
	o.cmds = append(o.cmds, qmp.Command{
		Name: commandSwitch,
		Args: map[string]any{"node": old, "overlay": disk.NodeName(o.Top.ID)},
	})
	return nil
}

// passState gives QEMU the file for the device state, and nothing else that a
// window before may have left in the set.
func (o *window) passState(ctx context.Context) error {
	client, err := o.r.connected(ctx, windowVerb)
	if err != nil {
		return err
	}
	dropState(ctx, client)
	return o.r.explain(ctx, windowVerb, client.AddFile(ctx, stateSet, o.State))
}

func dropState(ctx context.Context, client *qmp.Client) {
	// Refused when there is none; and one that stays is dropped before the next.
	_ = client.Execute(ctx, "remove-fd", map[string]any{"fdset-id": stateSet}, nil)
}

// open sends the commands and reads the pages beside them. It returns when
// QEMU has answered, or will not, and the pages are read.
func (o *window) open(ctx context.Context) error {
	client, err := o.r.connected(ctx, windowVerb)
	if err != nil {
		return err
	}
	o.start = time.Now()
	batch, err := client.Start(ctx, o.cmds...)
	if err != nil {
		return err
	}
	defer batch.Forget()
	at, next := o.start, 0
	if !o.WasPaused {
		if at, err = batch.Await(ctx, 0); err != nil {
			return err
		}
		o.times.Stop, next = at.Sub(o.start), 1
	}
	pages := make(chan error, 1)
	reading, stopReading := context.WithCancel(ctx)
	defer stopReading()
	go func() { pages <- o.readPages(reading) }()
	if err = o.await(ctx, batch, next, at); err == nil {
		select {
		case err = <-pages:
			o.times.Downtime = time.Since(o.start)
			return err
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	// The window has failed, and the vCPUs do not wait for its pages.
	stopReading()
	if !o.WasPaused {
		o.resumeNow()
	}
	<-pages
	return err
}

func (o *window) readPages(ctx context.Context) error {
	if o.Pages == nil {
		return nil
	}
	start := time.Now()
	err := o.Pages(ctx)
	o.times.Pages = time.Since(start)
	if err != nil {
		return fmt.Errorf("read last pages: %w", err)
	}
	return nil
}

// await waits for the answers from command i on. A refused save does not keep
// QEMU from the switch, which stays.
func (o *window) await(ctx context.Context, batch *qmp.Batch, i int, last time.Time) (err error) {
	for ; i < len(o.cmds); i++ {
		at, aerr := batch.Await(ctx, i)
		if aerr != nil && err == nil {
			err = aerr
		}
		if at.IsZero() {
			return err // none of the rest was answered either
		}
		if o.cmds[i].Name == commandSave {
			o.times.Devices = at.Sub(last)
		} else {
			o.times.Switch, o.switched = at.Sub(last), aerr == nil
		}
		last = at
	}
	return err
}

// resumeNow asks QEMU to let the vCPUs go and does not wait for an answer.
func (o *window) resumeNow() {
	_ = blocks.Aside(context.Background(), func(ctx context.Context) error {
		client, err := o.r.connected(ctx, windowVerb)
		if err != nil {
			return err
		}
		batch, err := client.Start(ctx, qmp.Command{Name: "cont"})
		if err == nil {
			batch.Forget()
		}
		return err
	})
}

// resume lets the vCPUs go. QEMU executes commands in order, so that the
// answer also tells that those before are done with. When there is none in time, what
// is left to do is done when QEMU answers, before anything else changes the run.
func (o *window) resume(ctx context.Context, release func()) error {
	r := o.r
	sent := time.Now()
	limit, cancel := graceFor(ctx)
	defer cancel()
	err := r.execute(limit, windowVerb, "cont", nil, nil)
	if err == nil {
		now := time.Now()
		o.times.Resume, o.times.Downtime = now.Sub(sent), now.Sub(o.start)
		return nil
	}
	if errdefs.Is(err, errdefs.WrongState) { // it has ended
		release()
		return err
	}
	unknown := errdefs.New(errdefs.OutcomeUnknown,
		"%s run %s: QEMU did not say by the deadline that the vCPUs go on (%v); they do as soon as it answers", windowVerb, r.cfg.RunID, err)
	if !r.spawn(func() {
		defer release()
		if r.execute(r.life, windowVerb, "cont", nil, nil) == nil {
			o.settle()
			r.log.Warn("vCPUs go on after a window that did not end in time", "after", time.Since(o.start))
		}
	}) {
		release()
	}
	return unknown
}

// graceFor is a context that ends resumeGrace after ctx's deadline.
func graceFor(ctx context.Context) (context.Context, context.CancelFunc) {
	until := time.Now()
	if deadline, ok := ctx.Deadline(); ok && deadline.After(until) && ctx.Err() == nil {
		until = deadline
	}
	return context.WithDeadline(context.WithoutCancel(ctx), until.Add(resumeGrace))
}

// settle takes back what was added for the window and is of no more use.
func (o *window) settle() {
	r := o.r
	_ = blocks.Aside(context.Background(), func(ctx context.Context) error {
		client, err := r.connected(ctx, windowVerb)
		if err == nil {
			dropState(ctx, client)
		}
		return err
	})
	if o.switched {
		r.within.Keep(o.Top.ID)
	}
	if o.top != "" && !o.switched {
		if err := r.disk.Settle(context.Background(), *o.Top, errNotSwitched); r.usable(windowVerb) == nil && err != nil && !errors.Is(err, errNotSwitched) {
			r.log.Warn("disk after a failed window", "error", err)
		}
	}
}

var errNotSwitched = errors.New("the disk was not switched")

// reason is the error of a window, or why the run ended in it.
func (r *run) reason(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if r.current().Err() != nil {
		return r.explain(ctx, windowVerb, err)
	}
	return fmt.Errorf("%s run %s: %w", windowVerb, r.cfg.RunID, err)
}

// canSave is UNSUPPORTED when QEMU cannot save its devices without memory, or
// when the binary was replaced since the run began by one that could not load them.
func (r *run) canSave(ctx context.Context) error {
	caps, err := r.host.Probe(ctx)
	if err != nil {
		return err
	}
	client, err := r.connected(ctx, windowVerb)
	if err != nil {
		return err
	}
	v := client.Version()
	if line := fmt.Sprintf("%d.%d", v.Major, v.Minor); line != caps.Line {
		return errdefs.New(errdefs.Unsupported,
			"%s run %s: it runs on QEMU %s, and %s is %s by now, which cannot continue it; stop and start the machine",
			windowVerb, r.cfg.RunID, line, caps.Binary, caps.Line)
	}
	if !caps.DeviceState {
		return errdefs.New(errdefs.Unsupported,
			"%s run %s: QEMU %s has no %s; use a QEMU for x86-64 from a distribution", windowVerb, r.cfg.RunID, caps.Version, commandSave)
	}
	return nil
}
