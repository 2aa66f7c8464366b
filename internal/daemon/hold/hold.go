// Package hold is the gate of each machine: one function admits every effect
// of every door, makes it wait while a checkpoint is under way, and refuses
// what was meant for an older generation. It knows nothing of what an effect
// is or how a checkpoint is taken.
package hold

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Gates holds the gate of each machine, by machine id.
type Gates struct {
	mu    sync.Mutex
	gates map[string]*gate
}

// gate is open, or closed by one holder; it keeps what was admitted and is
// still at work.
type gate struct {
	generation uint64
	// closed is nil while the gate is open; it is closed (as a channel) when
	// the gate opens again.
	closed chan struct{}
	why    string
	active map[*Admission]struct{}
	// changed is closed and replaced when the first effect comes and when the
	// last one goes; nil until somebody asks.
	changed chan struct{}
}

// Door is a way to have an effect in a machine.
type Door string

// The doors.
const (
	Exec    Door = "exec"
	Copy    Door = "cp"
	Dial    Door = "expose"
	Console Door = "console"
)

// Request asks for one effect to be let in.
type Request struct {
	// Machine is an id.
	Machine string
	// Generation is the one the caller believes the machine is in, 0 for
	// whichever it is at the time of the request.
	Generation uint64
	Door       Door
	// What names the effect for people: "exec nginx".
	What string
	// Waiting, when not nil, is called once with the reason when the effect
	// has to wait.
	Waiting func(why string)
}

// Effect is what was let in and is still at work.
type Effect struct {
	Door Door
	What string
}

// Admission is one effect that was let in. Its life: Admit gives it; Pass is
// asked before each further effect of the same stream; Done ends it.
type Admission struct {
	gates    *Gates
	request  Request
	expelled chan struct{}
	// done is guarded by the gates' mu.
	done bool
}

// New returns gates that are all open, at generation 0.
func New() *Gates { return &Gates{gates: map[string]*gate{}} }

func (g *Gates) of(machine string) *gate {
	found := g.gates[machine]
	if found == nil {
		found = &gate{active: map[*Admission]struct{}{}}
		g.gates[machine] = found
	}
	return found
}

// Admit lets one effect in. While the gate is closed it waits. When the machine
// is in another generation than the request's, also after the wait, the error
// is CONFLICT.
func (g *Gates) Admit(ctx context.Context, r Request) (*Admission, error) {
	if r.Generation == 0 {
		g.mu.Lock()
		r.Generation = g.of(r.Machine).generation
		g.mu.Unlock()
	}
	a := &Admission{gates: g, request: r, expelled: make(chan struct{})}
	if err := a.enter(ctx, r.Waiting); err != nil {
		return nil, err
	}
	return a, nil
}

// enter waits for the open gate and joins its active effects.
func (a *Admission) enter(ctx context.Context, waiting func(why string)) error {
	for {
		a.gates.mu.Lock()
		gate := a.gates.of(a.request.Machine)
		if gate.generation != a.request.Generation {
			a.gates.mu.Unlock()
			return a.outdated(gate.generation)
		}
		if gate.closed == nil {
			if !a.done { // else it has ended while it waited here
				gate.active[a] = struct{}{}
				gate.tell()
			}
			a.gates.mu.Unlock()
			return nil
		}
		opened, why := gate.closed, gate.why
		a.gates.mu.Unlock()
		if waiting != nil {
			waiting(why)
			waiting = nil
		}
		select {
		case <-opened:
		case <-ctx.Done():
			return fmt.Errorf("%s: held while %s: %w", a.request.What, why, context.Cause(ctx))
		}
	}
}

// Pass is asked before each further effect of an admitted stream: it waits
// while the gate is closed, and refuses when the machine was restored.
func (a *Admission) Pass(ctx context.Context) error { return a.enter(ctx, nil) }

// Done ends the effect; a Pass that still waits does not bring it back. Calling it
// again changes nothing.
func (a *Admission) Done() {
	a.gates.mu.Lock()
	defer a.gates.mu.Unlock()
	a.done = true
	gate := a.gates.of(a.request.Machine)
	if _, admitted := gate.active[a]; admitted {
		delete(gate.active, a)
		gate.tell()
	}
}

// tell wakes those who wait for the machine's doors to be used or left alone.
func (g *gate) tell() {
	if g.changed != nil && len(g.active) <= 1 {
		close(g.changed)
		g.changed = nil
	}
}

// Activity is how many effects are at work in a machine, and a channel that is
// closed when a first one comes or the last one goes.
func (g *Gates) Activity(machine string) (active int, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	gate := g.of(machine)
	if gate.changed == nil {
		gate.changed = make(chan struct{})
	}
	return len(gate.active), gate.changed
}

// Machine is the id of the machine that the effect was let into.
func (a *Admission) Machine() string { return a.request.Machine }

// Door is the way that the effect came.
func (a *Admission) Door() Door { return a.request.Door }

// Expelled is closed when a restore has made the effect's generation history.
func (a *Admission) Expelled() <-chan struct{} { return a.expelled }

// Outdated is the refusal an expelled effect gives its client.
func (a *Admission) Outdated() error {
	a.gates.mu.Lock()
	defer a.gates.mu.Unlock()
	return a.outdated(a.gates.of(a.request.Machine).generation)
}

// Held is why the gate is closed now; empty when it is open.
func (a *Admission) Held() string {
	a.gates.mu.Lock()
	defer a.gates.mu.Unlock()
	return a.gates.of(a.request.Machine).why
}

func (a *Admission) outdated(now uint64) error {
	return errdefs.New(errdefs.Conflict,
		"%s: the machine was restored (generation %d, this was meant for %d); look at its state and start again",
		a.request.What, now, a.request.Generation)
}

// Close closes the gate of a machine: new effects wait from now on. It gives
// what is still at work and the function that opens the gate again, which may
// be called more than once. A gate that is closed already is MACHINE_BUSY.
func (g *Gates) Close(machine, why string) (active []Effect, open func(), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	gate := g.of(machine)
	if gate.closed != nil {
		return nil, nil, errdefs.New(errdefs.MachineBusy, "%s: the machine is held while %s; wait for it", why, gate.why)
	}
	closed := make(chan struct{})
	gate.closed, gate.why = closed, why
	for a := range gate.active {
		active = append(active, Effect{a.request.Door, a.request.What})
	}
	slices.SortFunc(active, func(a, b Effect) int { return cmp.Compare(a.What, b.What) })
	return active, sync.OnceFunc(func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		gate.closed, gate.why = nil, ""
		close(closed)
	}), nil
}

// SetGeneration tells the gate which generation its machine is in. Effects of
// an older one are expelled, waiting ones refused.
func (g *Gates) SetGeneration(machine string, generation uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	gate := g.of(machine)
	gate.generation = generation
	for a := range gate.active {
		if a.request.Generation != generation {
			delete(gate.active, a)
			close(a.expelled)
		}
	}
}

// Forget drops the gate of a machine that is no more; its effects are expelled.
func (g *Gates) Forget(machine string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if gate := g.gates[machine]; gate != nil {
		for a := range gate.active {
			close(a.expelled)
		}
		delete(g.gates, machine)
	}
}
