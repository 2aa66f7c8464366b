//go:build linux

package guest

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// decidedTimeout is how long the client of a stream that broke while its machine
// was held is kept waiting until it is decided what became of the machine. What
// is left to do by then is to end a run and to record that.
const decidedTimeout = 30 * time.Second

// effect is what a client's stream has to do with a machine.
type effect struct {
	door *hold.Admission
	run  *fleet.Run
	what string
	// command is the id of the command that it is about, once that is known.
	command string
}

// outcome is what a stream's client is told: the reason of its end where we
// ended it, what became of the machine where that went away, else the guest's
// own word.
func (s *Service) outcome(ctx context.Context, e effect, err error) error {
	if err == nil {
		return nil
	}
	cause := context.Cause(ctx)
	if cause == nil && e.door.Held() != "" && errdefs.Is(wire.Decode(err), errdefs.OutcomeUnknown) {
		waiting, cancel := context.WithTimeout(ctx, decidedTimeout)
		cause = e.door.Pass(waiting)
		cancel()
	}
	if cause != nil && errdefs.Is(cause, errdefs.Conflict) {
		return wire.Encode(s.restored(ctx, e, cause))
	}
	if errors.Is(cause, errNotBegun) && !e.run.Ended() {
		return wire.Encode(s.notBegun(ctx, e))
	}
	if !e.run.Ended() || connect.CodeOf(err) == connect.CodeNotFound {
		return wire.Encode(err)
	}
	return wire.Encode(s.stopped(ctx, e))
}

// restored adds to the refusal of what was meant for an older generation what
// goes on in the new one: all that ran, if its memory was restored.
func (s *Service) restored(ctx context.Context, e effect, refusal error) error {
	m, err := s.cfg.Catalog.GetMachine(context.WithoutCancel(ctx), e.door.Machine())
	if err != nil || m.MemoryFile == "" || e.door.Door() != hold.Exec {
		return refusal
	}
	return errdefs.New(errdefs.Conflict, "%w; what ran at the checkpoint runs on: holdpoint attach %s", refusal, m.Name)
}

// notBegun says that a machine's guest does not answer, and what to do.
func (s *Service) notBegun(ctx context.Context, e effect) error {
	m, err := s.cfg.Catalog.GetMachine(context.WithoutCancel(ctx), e.door.Machine())
	if err != nil {
		return err
	}
	return errdefs.New(errdefs.Deadline, "%s: the guest of machine %s has not begun it in %.0f s; see holdpoint logs %s, go back with holdpoint restore %s, or end the machine with holdpoint stop --force %s",
		e.what, m.Name, startTimeout.Seconds(), m.Name, m.Name, m.Name)
}

// stopped says what became of a machine whose run has ended, and what to do.
func (s *Service) stopped(ctx context.Context, e effect) error {
	m, err := s.cfg.Catalog.GetMachine(context.WithoutCancel(ctx), e.door.Machine())
	switch {
	case err != nil || m.State != machine.Suspended:
		return errdefs.New(errdefs.WrongState, "%s: the machine stopped meanwhile", e.what)
	case e.command != "":
		return errdefs.New(errdefs.WrongState, "%s: machine %s was suspended meanwhile, and the command with it; it goes on with holdpoint resume %s, and is seen with holdpoint attach %s %s",
			e.what, m.Name, m.Name, m.Name, e.command)
	}
	return errdefs.New(errdefs.WrongState, "%s: machine %s was suspended meanwhile; run holdpoint resume %s and try again", e.what, m.Name, m.Name)
}
