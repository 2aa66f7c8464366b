package machinetest

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

func (r *fakeRun) Memory(context.Context) (machine.Memory, error) {
	return nil, errdefs.New(errdefs.Unsupported, "not built yet")
}

func (r *fakeRun) Window(context.Context, machine.Window) (machine.WindowTimes, error) {
	return machine.WindowTimes{}, errdefs.New(errdefs.Unsupported, "not built yet")
}

func (f *Fake) Platform(context.Context, machine.RunConfig) (machine.Platform, error) {
	return machine.Platform{}, errdefs.New(errdefs.Unsupported, "not built yet")
}
