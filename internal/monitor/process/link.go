//go:build linux

package process

import (
	"context"
	"time"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/outlet"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
)

// greetFirst and greetMost bound one attempt to greet the guest agent, which
// doubles from the one to the other. A greeting takes 5 to 81 ms, but may be
// swallowed by a port that is just changing hands, and then only another one
// helps; a booting guest, or one under load, needs the longer ones. The guest
// answers the last greeting it finds, so that repeating it does no harm.
const (
	greetFirst = 2 * time.Second
	greetMost  = 60 * time.Second
)

// retryFirst and retryMost bound the pause after a failed attempt to converse
// with the guest agent.
const (
	retryFirst = 50 * time.Millisecond
	retryMost  = 2 * time.Second
)

// relinkPatience is how long a request waits for a link that broke or that a
// successor is just making: a handshake takes 5 to 81 ms.
const relinkPatience = 5 * time.Second

// keepLink keeps a conversation with the guest agent of the run until ctx
// ends: while the guest stands still a standing one is left alone, and none is
// begun.
func (m *supervisor) keepLink(ctx context.Context, run machine.Run) {
	guest := m.greeting()
	retry, patience := retryFirst, greetFirst
	for ctx.Err() == nil && m.awaitResumed(ctx) == nil {
		began := time.Now()
		conv, err := guest.Converse(ctx, run, patience)
		if err == nil {
			err = m.attend(ctx, conv)
			conv.Close()
			patience = greetFirst
		} else {
			patience = min(2*patience, greetMost)
		}
		if ctx.Err() != nil {
			break
		}
		m.Log.Info("no link to the guest agent", "why", err)
		m.update(func() { m.linked, m.link, m.trouble = nil, nil, err.Error() })
		if time.Since(began) > retryMost {
			retry = retryFirst
		}
		select {
		case <-time.After(retry): // a pause between attempts that fail at once
		case <-ctx.Done():
		}
		retry = min(2*retry, retryMost)
	}
	m.update(func() { m.linked, m.link = nil, nil })
}

// attend makes the conversation the one that requests go through, once the
// guest has been told who it is, and watches it until it ends.
func (m *supervisor) attend(ctx context.Context, conv *relay.Conversation) error {
	m.update(func() { conv.RunID, m.linked = m.rec.RunID, conv })
	err := m.awaitActivation(ctx, conv)
	if err == nil {
		err = m.introduce(ctx, conv)
	}
	if err == nil {
		err = conv.Attend(ctx, m.halted)
	}
	return err
}

// awaitActivation attends to the conversation while the run waits.
func (m *supervisor) awaitActivation(ctx context.Context, conv *relay.Conversation) error {
	if !m.waiting() {
		return nil
	}
	attended, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		defer cancel()
		_ = m.watch(attended, func(st *monitorv1.StatusResponse) (bool, error) { return !st.GetWaiting(), nil })
	}()
	err := conv.Attend(attended, m.halted)
	cancel()
	<-watched
	if !m.waiting() && ctx.Err() == nil {
		return nil // should the conversation be broken, the next step finds out
	}
	return err
}

// introduce tells the guest who it is, unless it knows, and records the first
// time that it has acknowledged that.
func (m *supervisor) introduce(ctx context.Context, conv *relay.Conversation) error {
	cfg, run, rec := m.config(), m.runConfig(), m.present()
	first, sockets := rec.ReadyUnixNano == 0, uint32(0)
	var err error
	switch {
	case run.Incoming == nil || run.Incoming.Unconfigured:
		err = conv.Configure(ctx, outlet.Told(cfg.Guest, run.NIC))
		if err == nil && first && run.Incoming != nil {
			err = conv.SetClock(ctx) // no command may run before it is right
		}
	case first && !cfg.AsIs:
		sockets, err = conv.Continue(ctx, cfg.Guest.Hostname, cfg.Guest.MachineID)
	}
	m.mu.Lock()
	m.refusals.Count(err, run.Incoming != nil)
	m.mu.Unlock()
	if err == nil && first {
		err = m.record(func(r *monitor.Record) {
			r.ReadyUnixNano, r.ClosedSockets = time.Now().UnixNano(), sockets
			if r.Phase == monitor.Booting {
				r.Phase = monitor.Running
			}
		})
	}
	if err == nil && !first {
		m.catchUp(ctx, conv) // it may have stood still meanwhile
	}
	if err == nil {
		m.update(func() { m.link, m.trouble = conv, "" })
	}
	return err
}

// awaitOutlet waits until the guest may be let out: until it was told who it is,
// one that continues draws the same random numbers as others do.
func (m *supervisor) awaitOutlet(ctx context.Context) error {
	from := m.runConfig().Incoming
	err := m.watch(ctx, func(st *monitorv1.StatusResponse) (bool, error) {
		return !st.GetWaiting() && (from == nil || from.Unconfigured || m.cfg.AsIs || st.GetReady()), nil
	})
	if err == nil && m.adopted {
		m.outlet.Inherit(ctx, m.conversation)
	}
	return err
}

// conversation is the one to send a request through. A guest that has been
// ready before is waited for a moment; the errors are of kind WRONG_STATE and
// say why there is none.
func (m *supervisor) conversation(ctx context.Context) (*relay.Conversation, error) {
	patience := time.NewTimer(relinkPatience)
	defer patience.Stop()
	for {
		m.mu.Lock()
		conv, rec, trouble, changed := m.link, m.rec, m.trouble, m.changed
		m.mu.Unlock()
		if conv != nil && m.stall.Why() == "" && rec.Phase != monitor.UserPaused && rec.Phase != monitor.Held {
			return conv, nil
		}
		if err := m.unreachable(rec, trouble); err != nil {
			return nil, err
		}
		select {
		case <-changed:
		case <-patience.C:
			if trouble == "" {
				trouble = "the guest agent does not answer"
			}
			return nil, errdefs.New(errdefs.WrongState, "machine %s: %s; try again or look at its console with holdpoint logs", m.name(), trouble)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// endPatience is how long the reason of a link's break is waited for: when the
// guest has ended, its process is about to be found so.
const endPatience = 300 * time.Millisecond

// gone says why the guest went away in the middle of a call.
func (m *supervisor) gone(ctx context.Context, conv *relay.Conversation, call string) error {
	ctx, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	why := ""
	_ = m.watch(ctx, func(st *monitorv1.StatusResponse) (bool, error) {
		switch {
		case st.GetExit() != nil:
			why = " (its run has ended: " + st.GetExit().GetReason() + ")"
		case st.GetRunId() != conv.RunID:
			why = " (it rebooted)"
		}
		return why != "", nil
	})
	return errdefs.New(errdefs.OutcomeUnknown, "the guest of machine %s went away%s while the call %s was under way; it may have had its effect", m.name(), why, call)
}

// unreachable says why no link is to be expected soon; nil if one is.
func (m *supervisor) unreachable(rec monitor.Record, trouble string) error {
	switch {
	case rec.Phase == monitor.Exited:
		return errdefs.New(errdefs.WrongState, "machine %s: its run has ended; start it first", m.name())
	case rec.Phase == monitor.UserPaused:
		return errdefs.New(errdefs.WrongState, "machine %s is paused; resume it first", m.name())
	case rec.Phase == monitor.Held:
		return errdefs.New(errdefs.WrongState, "machine %s stands still until its checkpoint is decided; try again", m.name())
	case m.stall.Why() != "":
		return m.stall.Err()
	case m.cfg.Wait && rec.Activation == nil:
		return errdefs.New(errdefs.WrongState, "machine %s waits to be told who it is", m.name())
	case rec.ReadyUnixNano == 0 && trouble != "":
		return errdefs.New(errdefs.WrongState, "machine %s: its guest is not ready: %s", m.name(), trouble)
	case rec.ReadyUnixNano == 0:
		return errdefs.New(errdefs.WrongState, "machine %s: its guest is still booting; try again once it is ready", m.name())
	}
	return nil
}
