//go:build linux

package process

import (
	"context"
	"fmt"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
)

// present is the record as it is now.
func (m *supervisor) present() monitor.Record {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rec.Clone()
}

// config is what the run was given, and told since.
func (m *supervisor) config() monitor.Config { return m.cfg.Activated(m.present().Activation) }

// name is what people call the machine.
func (m *supervisor) name() string { return m.config().Name() }

// runConfig is the config of the run that the record is about.
func (m *supervisor) runConfig() machine.RunConfig {
	rec := m.present()
	cfg := m.cfg.Activated(rec.Activation).Run
	if rec.RunID == m.cfg.Run.RunID {
		cfg.Cmdline = m.cfg.Run.Cmdline // what its guest was booted with
	} else {
		cfg.RunID, cfg.Incoming = rec.RunID, nil
	}
	cfg.Disk = rec.Disk
	return cfg
}

// waiting reports whether the run waits for Activate.
func (m *supervisor) waiting() bool { return m.cfg.Wait && m.present().Activation == nil }

// standby reports whether it does so without ever having run.
func (m *supervisor) standby() bool { return m.waiting() && m.runConfig().Incoming != nil }

// waits refuses what a standby does not do.
func (m *supervisor) waits(verb string) error {
	return errdefs.New(errdefs.WrongState, "%s machine %s: it waits to be told who it is; activate it first", verb, m.name())
}

// greeting is how to begin a conversation with the guest of the run.
func (m *supervisor) greeting() relay.Guest {
	magic, err := link.MagicIn(m.runConfig().Cmdline)
	if err != nil {
		m.Log.Error("the guest cannot be greeted", "error", err) // checked when it was given
	}
	return relay.Guest{Magic: magic}
}

// Present is that of captures.Supervisor.
func (m *supervisor) Present() (machine.Run, machine.RunConfig, monitor.Record) {
	m.mu.Lock()
	run := m.run
	m.mu.Unlock()
	return run, m.runConfig(), m.present()
}

// Turn is that of captures.Supervisor.
func (m *supervisor) Turn(ctx context.Context) (release func(), err error) {
	select {
	case m.turn <- struct{}{}:
		return func() { <-m.turn }, nil
	case <-ctx.Done():
		return nil, errdefs.As(errdefs.KindOf(ctx.Err()), fmt.Errorf("another change of it is still under way: %w", ctx.Err()))
	}
}

// Record is that of captures.Supervisor.
func (m *supervisor) Record(change func(*monitor.Record)) error { return m.record(change) }

// Amend is that of captures.Supervisor.
func (m *supervisor) Amend(change func(*monitor.Record)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left {
		return
	}
	if err := m.write(change, true); err != nil {
		m.Log.Error("the record of the run is behind", "error", err)
	}
}

// asIs reports whether the guest keeps the time that it continued with.
func (m *supervisor) asIs() bool { return m.cfg.AsIs && m.runConfig().Incoming != nil }

// SetClock is that of captures.Supervisor.
func (m *supervisor) SetClock(ctx context.Context) error {
	if m.asIs() {
		return nil
	}
	return m.onClock(ctx, func(conv *relay.Conversation) error { return conv.SetClock(ctx) })
}

// TuneClock is that of captures.Supervisor.
func (m *supervisor) TuneClock(ctx context.Context) error {
	if m.asIs() {
		return nil
	}
	return m.onClock(ctx, func(conv *relay.Conversation) error { return conv.TuneClock(ctx) })
}

// StepClock is that of captures.Supervisor.
func (m *supervisor) StepClock(ctx context.Context, by time.Duration) error {
	return m.onClock(ctx, func(conv *relay.Conversation) error { return conv.StepClock(ctx, by) })
}

// onClock changes the guest's clock, one change at a time. A guest that was
// never ready gets the time when it is told who it is.
func (m *supervisor) onClock(ctx context.Context, change func(*relay.Conversation) error) error {
	select {
	case m.clock <- struct{}{}:
		defer func() { <-m.clock }()
	case <-ctx.Done():
		return ctx.Err()
	}
	m.mu.Lock()
	conv, ready := m.link, m.rec.ReadyUnixNano != 0
	m.mu.Unlock()
	switch {
	case !ready:
		return nil
	case conv == nil:
		return errdefs.New(errdefs.WrongState, "set the guest's clock: the guest agent does not answer")
	}
	return change(conv)
}

// Stands is that of captures.Supervisor.
func (m *supervisor) Stands() error { return m.stall.Err() }

// Notify is that of stall.Supervisor.
func (m *supervisor) Notify() { m.update(func() {}) }

// CatchUp is that of stall.Supervisor.
func (m *supervisor) CatchUp(ctx context.Context) {
	_ = m.onClock(ctx, func(conv *relay.Conversation) error {
		m.catchUp(ctx, conv)
		return nil
	})
}

// catchUpTimeout bounds a correction of the clock that something waits for.
const catchUpTimeout = 2 * time.Second

// catchUp corrects the clock of a guest that stood still or was out of touch.
// What it misses is corrected after the next capture, pause or greeting.
func (m *supervisor) catchUp(ctx context.Context, conv *relay.Conversation) {
	if conv == nil || m.halted() || m.asIs() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), catchUpTimeout)
	defer cancel()
	if err := conv.SetClock(ctx); err != nil {
		m.Log.Warn("the guest's clock is behind", "error", err)
	}
}
