//go:build linux

package qemu

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Memory is that of machine.Run.
func (r *run) Memory(context.Context) (machine.Memory, error) {
	return nil, errdefs.New(errdefs.Unsupported, "not built yet")
}

// Window is that of machine.Run.
func (r *run) Window(context.Context, machine.Window) (machine.WindowTimes, error) {
	return machine.WindowTimes{}, errdefs.New(errdefs.Unsupported, "not built yet")
}

// Platform is that of machine.Hypervisor.
func (q *QEMU) Platform(context.Context, machine.RunConfig) (machine.Platform, error) {
	return machine.Platform{}, errdefs.New(errdefs.Unsupported, "not built yet")
}
