package catalog_test

import (
	"context"
	"testing"

	"go.uber.org/goleak"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

func TestCanceledCallsChangeNothing(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	f.machine("m1", "web")
	ctx, cancel := context.WithCancel(f.ctx)
	cancel()
	f.fails(f.SetMachineState(ctx, "m1", machine.Stopped), errdefs.Interrupted)
	_, err := f.ListMachines(ctx)
	f.fails(err, errdefs.Interrupted)
	_, err = f.ResolveMachine(ctx, "web")
	f.fails(err, errdefs.Interrupted)
	m, err := f.GetMachine(f.ctx, "m1")
	f.ok(err)
	if m.State != machine.Creating {
		t.Errorf("state %s", m.State)
	}
}

func TestCloseLeavesNothingRunning(t *testing.T) {
	before := goleak.IgnoreCurrent()
	c, err := catalog.Open(context.Background(), catalog.Config{Path: t.TempDir() + "/catalog.db"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.ListMachines(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	goleak.VerifyNone(t, before)
}
