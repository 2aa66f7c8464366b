//go:build linux

package qemu

import (
	"context"
	"fmt"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
)

// Platform is that of machine.Hypervisor.
func (q *QEMU) Platform(ctx context.Context, cfg machine.RunConfig) (machine.Platform, error) {
	caps, err := q.host.Probe(ctx)
	if err != nil {
		return machine.Platform{}, err
	}
	return argv.Platform(caps, cfg), nil
}

// Memory is that of machine.Run. It is a *dirty.Tracker, not armed.
func (r *run) Memory(ctx context.Context) (machine.Memory, error) {
	const verb = "look into memory of"
	if err := r.usable(verb); err != nil {
		return nil, err
	}
	if err := dirty.CheckPolicy(); err != nil {
		return nil, fmt.Errorf("%s run %s: %w", verb, r.cfg.RunID, err)
	}
	t, err := dirty.Attach(ctx, memoryOf(r.cfg, r.within, r.proc.ID().PID))
	if err != nil {
		return nil, fmt.Errorf("%s run %s: %w", verb, r.cfg.RunID, err)
	}
	return t, nil
}
