//go:build linux

// Package guest serves what goes on inside machines: commands, copies,
// connections and consoles. Each effect passes the machine's gate; what the
// effect is, is between the client and the guest agent.
package guest

import (
	"context"
	"fmt"
	"sync"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/fleet"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/slumber"
	"github.com/holdpoint/holdpoint/internal/home"
)

// Config is what a Service works with.
type Config struct {
	Catalog *catalog.Catalog
	Gates   *hold.Gates
	Keeper  *keeper.Keeper
	Home    *home.Home
	// Wake resumes a machine that sleeps until somebody comes.
	Wake func(ctx context.Context, machineID string) error
}

// Service serves GuestService, and connections for the proxy.
type Service struct {
	cfg Config

	mu sync.Mutex
	// consoles are the machines at whose console somebody is, commands how many
	// clients are at commands of a machine.
	consoles map[string]bool
	commands map[string]int
}

// New returns a Service.
func New(cfg Config) *Service {
	return &Service{cfg: cfg, consoles: map[string]bool{}, commands: map[string]int{}}
}

// enter resolves a machine, passes its gate and gives its run. The caller
// calls Done on the admission.
func (s *Service) enter(ctx context.Context, ref string, r hold.Request) (*hold.Admission, *fleet.Run, error) {
	m, err := s.cfg.Catalog.ResolveMachine(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	return s.enterMachine(ctx, m, r)
}

func (s *Service) enterMachine(ctx context.Context, m catalog.Machine, r hold.Request) (*hold.Admission, *fleet.Run, error) {
	r.Machine, r.What = m.ID, fmt.Sprintf("%s in machine %s", r.What, m.Name)
	for {
		door, err := s.cfg.Gates.Admit(ctx, r)
		if err != nil {
			return nil, nil, err
		}
		run, asleep, err := s.running(ctx, m.ID, string(r.Door))
		if err == nil && !asleep {
			err = s.cfg.Catalog.UseMachine(ctx, m.ID)
			if err == nil {
				return door, run, nil
			}
		}
		door.Done()
		if err == nil {
			if r.Waiting != nil {
				r.Waiting("machine " + m.Name + " is being resumed")
			}
			// It may be asleep again by then, or what was suspended is removed.
			err = s.cfg.Wake(ctx, m.ID)
		}
		if err != nil {
			return nil, nil, err
		}
	}
}

// running gives the run of a machine as it is now, which may have changed since
// it was resolved; asleep is whether it has none and is to be woken.
func (s *Service) running(ctx context.Context, machineID, verb string) (run *fleet.Run, asleep bool, err error) {
	m, err := s.cfg.Catalog.GetMachine(ctx, machineID)
	if err != nil || slumber.Wakes(m) {
		return nil, err == nil, err
	}
	run, err = s.cfg.Keeper.Running(m, verb)
	return run, false, err
}

// wake resumes a machine that sleeps until somebody comes.
func (s *Service) wake(ctx context.Context, ref string) error {
	m, err := s.cfg.Catalog.ResolveMachine(ctx, ref)
	if err != nil || !slumber.Wakes(m) {
		return err
	}
	return s.cfg.Wake(ctx, m.ID)
}

// look gives a machine's run for a question that has no effect.
func (s *Service) look(ctx context.Context, ref, verb string) (*fleet.Run, error) {
	m, err := s.cfg.Catalog.ResolveMachine(ctx, ref)
	if err != nil {
		return nil, err
	}
	return s.cfg.Keeper.Running(m, verb)
}
