package catalog_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestAdmit(t *testing.T) {
	f := open(t)
	op := catalog.Operation{ID: "op1", RequestID: "r1", Verb: "run", Options: []byte(`{"name":"web","memory":9007199254740993}`), MachineName: "web", Phase: "admitted"}
	first, existing, err := f.Admit(f.ctx, op, time.Minute)
	f.ok(err)
	if existing || first.State != catalog.OperationRunning || first.CreatedAt.IsZero() || !first.EndedAt.IsZero() {
		t.Fatalf("existing %v, operation %+v", existing, first)
	}
	op.ID, op.Options = "op2", []byte(` { "memory": 9007199254740993, "name": "web" } `)
	again, existing, err := f.Admit(f.ctx, op, time.Minute)
	f.ok(err)
	if diff := cmp.Diff(first, again); !existing || diff != "" {
		t.Errorf("existing %v: %s", existing, diff)
	}
	op.Options = []byte(`{"name":"web","memory":9007199254740992}`)
	_, _, err = f.Admit(f.ctx, op, time.Minute)
	f.fails(err, errdefs.RequestIDConflict, `"r1"`, "op1")
	op.Options, op.Verb = first.Options, "start"
	_, _, err = f.Admit(f.ctx, op, time.Minute)
	f.fails(err, errdefs.RequestIDConflict, `"r1"`, "op1")
	op.RequestID, op.Options = "r2", []byte(`{`)
	_, _, err = f.Admit(f.ctx, op, time.Minute)
	f.fails(err, errdefs.Invalid, "JSON")
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone, Result: []byte(`{"a":1}`)}))
	op.RequestID, op.Verb, op.Options = "r1", "run", first.Options
	done, existing, err := f.Admit(f.ctx, op, time.Minute)
	f.ok(err)
	if !existing || done.State != catalog.OperationDone || string(done.Result) != `{"a":1}` {
		t.Errorf("existing %v, operation %+v", existing, done)
	}
}

func TestOperationLife(t *testing.T) {
	f := open(t)
	f.admit("op1", "run")
	f.ok(f.UpdateOperation(f.ctx, "op1", catalog.Progress{Phase: "booting", MachineID: "m1", MachineName: "web"}))
	f.ok(f.UpdatePhase(f.ctx, "op1", "waiting", []byte(`{"run":"x"}`)))
	f.ok(f.UpdatePhase(f.ctx, "op1", "", nil))
	f.reopen()
	list, err := f.Unfinished(f.ctx)
	f.ok(err)
	if len(list) != 1 || list[0].Phase != "waiting" || list[0].MachineID != "m1" || string(list[0].Detail) != `{"run":"x"}` {
		t.Fatalf("unfinished %+v", list)
	}
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationFailed, Err: errdefs.New(errdefs.NoSpace, "two\nlines")}))
	op, err := f.GetOperation(f.ctx, "op1")
	f.ok(err)
	if op.State != catalog.OperationFailed || op.ErrorKind != errdefs.NoSpace || op.ErrorMessage != "two lines" || op.EndedAt.IsZero() {
		t.Errorf("operation %+v", op)
	}
	f.fails(f.UpdatePhase(f.ctx, "op1", "x", nil), errdefs.WrongState, "op1")
	f.fails(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}), errdefs.WrongState, "op1")
	f.fails(f.Acquire(f.ctx, "op1", time.Minute, catalog.Claim{Kind: catalog.MachineResource, ID: "m"}), errdefs.WrongState, "op1")
	_, err = f.GetOperation(f.ctx, "none")
	f.fails(err, errdefs.NotFound, "none", "operation ls")
}

func TestEndedOperationsArePruned(t *testing.T) {
	f := open(t) // keeps 5
	f.admit("running", "run")
	for i := range 8 {
		f.admit(id(i), "stop")
		f.ok(f.Finish(f.ctx, id(i), catalog.Outcome{State: catalog.OperationDone}))
	}
	list, err := f.ListOperations(f.ctx, "", true)
	f.ok(err)
	var got []string
	for _, o := range list {
		got = append(got, o.ID)
	}
	if diff := cmp.Diff([]string{id(7), id(6), id(5), id(4), id(3), "running"}, got); diff != "" {
		t.Error(diff)
	}
	list, err = f.ListOperations(f.ctx, "", false)
	f.ok(err)
	if len(list) != 1 || list[0].ID != "running" {
		t.Errorf("running %+v", list)
	}
}

func TestLeases(t *testing.T) {
	f := open(t)
	f.image("build1", "debian")
	f.machine("m1", "web")
	exclusive := catalog.Claim{Kind: catalog.MachineResource, ID: "m1", Exclusive: true}
	shared := catalog.Claim{Kind: catalog.CheckpointResource, ID: "c1"}
	f.admit("op1", "checkpoint create", exclusive, shared)
	f.admit("op2", "restore", shared) // shared with shared
	f.fails(f.Acquire(f.ctx, "op2", time.Minute, exclusive), errdefs.MachineBusy, "machine web is busy: checkpoint create (operation op1)", "operation wait op1")
	own := shared
	own.Exclusive = true
	f.fails(f.Acquire(f.ctx, "op1", time.Minute, own), errdefs.Referenced, "checkpoint c1 is busy", "restore (operation op2)")
	_, _, err := f.Admit(f.ctx, catalog.Operation{ID: "op3", RequestID: "r3", Verb: "stop"}, time.Minute,
		catalog.Claim{Kind: catalog.ImageResource, ID: "build1"}, exclusive)
	f.fails(err, errdefs.MachineBusy, "op1")
	if _, err := f.GetOperation(f.ctx, "op3"); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("a refused operation was recorded: %v", err)
	}
	leases, err := f.Leases(f.ctx)
	f.ok(err)
	if len(leases) != 3 {
		t.Errorf("leases %+v", leases)
	}
	f.clock.now = f.clock.now.Add(50 * time.Second)
	f.ok(f.Renew(f.ctx, "op1", time.Minute))
	f.ok(f.Renew(f.ctx, "op1", time.Second)) // never nearer
	f.clock.now = f.clock.now.Add(30 * time.Second)
	f.fails(f.Acquire(f.ctx, "op2", time.Minute, exclusive), errdefs.MachineBusy, "op1")
	f.clock.now = f.clock.now.Add(time.Hour)
	f.ok(f.Acquire(f.ctx, "op2", time.Minute, exclusive)) // op1's expired
	f.fails(f.Acquire(f.ctx, "op1", time.Minute, exclusive), errdefs.MachineBusy, "restore (operation op2)")
	f.ok(f.Release(f.ctx, "op2", exclusive))
	f.ok(f.Acquire(f.ctx, "op1", time.Minute, exclusive))
	f.ok(f.Release(f.ctx, "op1"))
	f.ok(f.Finish(f.ctx, "op2", catalog.Outcome{State: catalog.OperationDone}))
	leases, err = f.Leases(f.ctx)
	f.ok(err)
	if len(leases) != 0 {
		t.Errorf("leases left %+v", leases)
	}
}

func TestAnExpiredLeaseKeepsItsLayer(t *testing.T) {
	f := open(t)
	f.admit("op1", "restore")
	f.ok(f.AddLayer(f.ctx, "op1", layer("staged", "m1")))
	f.clock.now = f.clock.now.Add(100 * time.Hour)
	f.unreferencedAre("")
	f.fails(f.DeleteLayers(f.ctx, "staged"), errdefs.Referenced, "staged")
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationFailed, Err: errors.New("x")}))
	f.unreferencedAre("staged")
}

// TestManyAtOnce: of 16 that want one machine exactly one gets it at a time,
// and readers see whole transactions.
func TestManyAtOnce(t *testing.T) {
	f := open(t)
	c, err := catalog.Open(f.ctx, catalog.Config{Path: f.path() + "2"})
	f.ok(err)
	defer func() { f.ok(c.Close()) }()
	f.ok(c.PutImage(f.ctx, catalog.Image{BuildID: "build1"}))
	f.ok(c.CreateMachine(f.ctx, catalog.Machine{ID: "m1", Name: "web", ImageBuildID: "build1", State: "stopped"}, layer("m1-0", "m1")))
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		holder string
		won    int
	)
	for g := range 16 {
		wg.Go(func() {
			for i := range 5 {
				op := fmt.Sprintf("op-%d-%d", g, i)
				_, _, err := c.Admit(f.ctx, catalog.Operation{ID: op, RequestID: op, Verb: "stop"}, time.Minute,
					catalog.Claim{Kind: catalog.MachineResource, ID: "m1", Exclusive: true})
				if errdefs.Is(err, errdefs.MachineBusy) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if holder != "" {
					t.Errorf("%s and %s hold the machine", holder, op)
				}
				holder, won = op, won+1
				mu.Unlock()
				if m, err := c.GetMachine(f.ctx, "m1"); err != nil || m.HeldBy != op {
					t.Errorf("held by %q, want %q (%v)", m.HeldBy, op, err)
				}
				mu.Lock()
				holder = ""
				mu.Unlock()
				if err := c.Finish(f.ctx, op, catalog.Outcome{State: catalog.OperationDone}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if won == 0 {
		t.Error("nobody ever got the machine")
	}
}
