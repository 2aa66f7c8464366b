//go:build linux

package proof

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const (
	// quietFor is how long no operation must have run before a checkpoint is
	// proven unasked.
	quietFor = 3 * time.Second
	// firstWait and longestWait are how long a busy host is left alone before
	// it is looked at again.
	firstWait   = 3 * time.Second
	longestWait = time.Minute
	// asideDeadline bounds one proof.
	asideDeadline = 10 * time.Minute
)

// Look tells that there may be checkpoints to prove.
func (p *Prover) Look() {
	select {
	case p.look <- struct{}{}:
	default: // it will look anyway
	}
}

// Stop ends what is under way; Close waits for it.
func (p *Prover) Stop() { p.cancel() }

// StandAside ends the proof under way of a checkpoint of the machine, for an
// operation that should not wait for it. It is taken up again later.
func (p *Prover) StandAside(machineID string) {
	p.mu.Lock()
	if p.stop != nil && p.machine == machineID {
		p.stop()
	}
	p.mu.Unlock()
}

// Untold gives, once, what failed of the machine's checkpoints.
func (p *Prover) Untold(machineID string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	lines := p.untold[machineID]
	delete(p.untold, machineID)
	return lines
}

// work signs what was sealed, and then proves one checkpoint after the other, the
// newest first, whenever there are any and the host is quiet.
func (p *Prover) work() {
	select {
	case <-p.look: // not before the home is settled
	case <-p.ctx.Done():
		return
	}
	wait := firstWait
	for {
		if err := p.cfg.Capturer.Sign(p.ctx); err != nil && p.ctx.Err() == nil {
			p.cfg.Log.Warn("record the digests of layers", "error", err)
		}
		k, found := p.next()
		if !found {
			select {
			case <-p.look:
				wait = firstWait
				continue
			case <-p.ctx.Done():
				return
			}
		}
		if p.cfg.When != Now && !p.quiet() {
			if !p.sleep(wait) {
				return
			}
			wait = min(2*wait, longestWait)
			continue
		}
		wait = firstWait
		p.proveAside(k)
		if p.ctx.Err() != nil {
			return
		}
	}
}

func (p *Prover) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// next is the newest checkpoint that is worth a try.
func (p *Prover) next() (checkpoint.Checkpoint, bool) {
	if p.cfg.When == Off {
		return checkpoint.Checkpoint{}, false
	}
	list, err := p.cfg.Catalog.UnverifiedCheckpoints(p.ctx)
	if err != nil {
		if p.ctx.Err() == nil {
			p.cfg.Log.Warn("look for checkpoints to verify", "error", err)
		}
		return checkpoint.Checkpoint{}, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range list {
		if !p.tried[k.ID] {
			return k, true
		}
	}
	return checkpoint.Checkpoint{}, false
}

// quiet reports whether nobody would notice that a checkpoint is proven.
func (p *Prover) quiet() bool { return p.cfg.Engine.Quiet() >= quietFor && Idle() }

// Idle reports whether the host has fewer things to do than CPUs.
func Idle() bool {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return false
	}
	var load float64
	if _, err := fmt.Sscan(string(data), &load); err != nil {
		return false
	}
	return load < float64(runtime.NumCPU())
}

// proveAside proves one checkpoint unless its machine is at something.
func (p *Prover) proveAside(k checkpoint.Checkpoint) {
	ctx, cancel := context.WithTimeout(p.ctx, asideDeadline)
	defer cancel()
	p.mu.Lock()
	p.stop, p.machine = cancel, k.MachineID
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.stop, p.machine = nil, ""
	}()
	m, err := p.cfg.Catalog.GetMachine(ctx, k.MachineID)
	if err != nil || m.HeldBy != "" {
		p.sleep(firstWait) // it will be free, or gone
		return
	}
	_, err = p.Prove(ctx, k, func(int64, int64) {})
	switch {
	case err == nil:
		p.cfg.Log.Info("checkpoint verified", "checkpoint", k.ID, "machine", m.Name)
	case ctx.Err() != nil:
		// Somebody else came first.
		p.sleep(firstWait)
	case errdefs.Is(err, errdefs.NotFound):
	case condemns(err):
		p.cfg.Log.Error("a checkpoint cannot be restored", "checkpoint", k.ID, "machine", m.Name, "error", err)
		p.mu.Lock()
		p.untold[m.ID] = append(p.untold[m.ID], Warning(k, err.Error()))
		p.mu.Unlock()
	default:
		p.cfg.Log.Warn("verify a checkpoint", "checkpoint", k.ID, "machine", m.Name, "error", err)
		p.mu.Lock()
		p.tried[k.ID] = true
		p.mu.Unlock()
	}
}

// Warning tells a person that a checkpoint cannot be restored.
func Warning(k checkpoint.Checkpoint, problem string) string {
	name := nameOf(k)
	return fmt.Sprintf("WARNING: checkpoint %s FAILED verification and may not be restorable: %s; take another one, and see holdpoint checkpoint show %s", name, problem, name)
}

// nameOf is what a person calls a checkpoint.
func nameOf(k checkpoint.Checkpoint) string {
	if k.Name != "" {
		return k.Name
	}
	return k.ID
}
