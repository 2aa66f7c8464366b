package operation_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fixture struct {
	*operation.Engine
	catalog *catalog.Catalog
}

func newFixture(t *testing.T) fixture {
	t.Helper()
	c, err := catalog.Open(t.Context(), catalog.Config{Path: filepath.Join(t.TempDir(), "catalog.db")})
	if err != nil {
		t.Fatal(err)
	}
	e := operation.New(operation.Config{Journal: c, Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() {
		if err := e.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return fixture{e, c}
}

func request(id, name string) operation.Request {
	return operation.Request{ID: id, Verb: "run", Timeout: time.Minute, Options: &holdpointv1.RunMachineRequest{Name: name}}
}

func done(context.Context, *operation.Work) (*holdpointv1.OperationResult, error) {
	return &holdpointv1.OperationResult{Machine: &holdpointv1.Machine{Name: "web"}}, nil
}

func TestOutcomeIsRecordedAndRepeated(t *testing.T) {
	e := newFixture(t)
	op, err := e.Begin(t.Context(), request("r1", "web"), done)
	if err != nil {
		t.Fatal(err)
	}
	ended, err := e.Wait(t.Context(), op.GetId())
	if err != nil || ended.GetState() != holdpointv1.OperationState_OPERATION_STATE_DONE || ended.GetResult().GetMachine().GetName() != "web" {
		t.Fatalf("ended as %v, %v", ended, err)
	}
	again, err := e.Begin(t.Context(), request("r1", "web"), func(context.Context, *operation.Work) (*holdpointv1.OperationResult, error) {
		t.Error("the same request was carried out again")
		return nil, nil
	})
	if err != nil || again.GetId() != op.GetId() || again.GetResult().GetMachine().GetName() != "web" {
		t.Errorf("the same request gave %v, %v", again, err)
	}
	if _, err := e.Begin(t.Context(), request("r1", "other"), done); !errdefs.Is(err, errdefs.RequestIDConflict) {
		t.Errorf("another request with the same id: %v, want REQUEST_ID_CONFLICT", err)
	}
}

func TestClientMayLeave(t *testing.T) {
	e := newFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	proceed := make(chan struct{})
	op, err := e.Begin(ctx, request("", "web"), func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		<-proceed
		if ctx.Err() != nil {
			t.Error("the operation ended with its client")
		}
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := e.Wait(ctx, op.GetId()); !errdefs.Is(err, errdefs.Interrupted) {
		t.Errorf("wait of a client that left: %v", err)
	}
	close(proceed)
	if ended, err := e.Wait(t.Context(), op.GetId()); err != nil || ended.GetState() != holdpointv1.OperationState_OPERATION_STATE_DONE {
		t.Errorf("%v, %v", ended, err)
	}
}

func TestCancelAndDeadline(t *testing.T) {
	e := newFixture(t)
	wait := func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	op, err := e.Begin(t.Context(), request("", "web"), wait)
	if err != nil {
		t.Fatal(err)
	}
	ended, err := e.Cancel(t.Context(), op.GetId())
	if err != nil || ended.GetState() != holdpointv1.OperationState_OPERATION_STATE_CANCELED || ended.GetError().GetKind() != string(errdefs.Interrupted) {
		t.Errorf("canceled as %v, %v", ended, err)
	}
	late := request("", "web")
	late.Timeout = time.Millisecond
	if op, err = e.Begin(t.Context(), late, wait); err != nil {
		t.Fatal(err)
	}
	ended, err = e.Wait(t.Context(), op.GetId())
	if err != nil || ended.GetState() != holdpointv1.OperationState_OPERATION_STATE_FAILED || ended.GetError().GetKind() != string(errdefs.Deadline) {
		t.Errorf("ended as %v, %v", ended, err)
	}
}

func TestWatchersSeePhasesAndTheEnd(t *testing.T) {
	e := newFixture(t)
	step := make(chan struct{})
	op, err := e.Begin(t.Context(), request("", "web"), func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		if err := w.Enter(ctx, "boot", "booting the guest", map[string]string{"run": "1"}); err != nil {
			return nil, err
		}
		w.Progress(1, 2)
		w.Note("slow %s", "host")
		<-step
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var seen []*holdpointv1.Operation
	err = e.Watch(t.Context(), op.GetId(), func(op *holdpointv1.Operation) error {
		seen = append(seen, op)
		if op.GetDoneBytes() == 1 {
			close(step)
		}
		return nil
	})
	last := seen[len(seen)-1]
	if err != nil || !operation.Ended(last) || last.GetResult().GetNotes()[0] != "slow host" {
		t.Errorf("saw %v, %v", seen, err)
	}
	recorded, err := e.catalog.GetOperation(t.Context(), op.GetId())
	if err != nil || recorded.Phase != "boot" || string(recorded.Detail) != `{"run":"1"}` {
		t.Errorf("recorded %+v, %v", recorded, err)
	}
}

func TestClosedEngineRefuses(t *testing.T) {
	e := newFixture(t)
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Begin(t.Context(), request("", "web"), done); !errdefs.Is(err, errdefs.WrongState) {
		t.Errorf("begin after close: %v, want WRONG_STATE", err)
	}
}

// flaky is a journal in which some outcomes cannot be recorded.
type flaky struct {
	*catalog.Catalog
	fails atomic.Int32
	kind  errdefs.Kind
}

func (f *flaky) Finish(ctx context.Context, id string, out catalog.Outcome) error {
	if f.fails.Add(-1) >= 0 {
		return errdefs.New(f.kind, "the disk does not write")
	}
	return f.Catalog.Finish(ctx, id, out)
}

// TestOutcomeIsRecordedLater: when it cannot be at first; and what a failed one could
// not undo is settled then.
func TestOutcomeIsRecordedLater(t *testing.T) {
	c, err := catalog.Open(t.Context(), catalog.Config{Path: filepath.Join(t.TempDir(), "catalog.db")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f := &flaky{Catalog: c, kind: errdefs.Storage}
	settled := make(chan string, 1)
	room := atomic.Int32{}
	e := operation.New(operation.Config{
		Journal: f, Log: slog.New(slog.DiscardHandler), Room: func() bool { return room.Add(1) == 1 },
		Settle: func(_ context.Context, _ *operation.Work, op catalog.Operation) (*holdpointv1.OperationResult, error) {
			settled <- op.Phase
			return nil, errdefs.New(errdefs.Interrupted, "it was undone")
		},
	})
	fail := func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		if err := w.Enter(ctx, "half", "half of it", struct{}{}); err != nil {
			return nil, err
		}
		return nil, errdefs.New(errdefs.Conflict, "no")
	}
	for name, test := range map[string]struct {
		body  operation.Body
		fails int32
		want  catalog.OperationState
		kind  errdefs.Kind
	}{
		"done":   {done, 2, catalog.OperationDone, ""},
		"failed": {fail, 1, catalog.OperationFailed, errdefs.Conflict},
	} {
		f.fails.Store(test.fails)
		op, err := e.Begin(t.Context(), request(name, name), test.body)
		if err != nil {
			t.Fatal(err)
		}
		said, err := e.Wait(t.Context(), op.GetId())
		if err != nil || said.GetError().GetKind() != string(errdefs.OutcomeUnknown) {
			t.Errorf("%s: at first %v, %v", name, said, err)
		}
		var now catalog.Operation
		for now.State != test.want && t.Context().Err() == nil {
			if now, err = c.GetOperation(t.Context(), op.GetId()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Millisecond)
		}
		if now.ErrorKind != test.kind {
			t.Errorf("%s: recorded %+v", name, now)
		}
	}
	if phase := <-settled; phase != "half" {
		t.Errorf("settled from phase %q", phase)
	}
	// Where there is no room, some is made, and it is recorded at once.
	f.kind = errdefs.NoSpace
	f.fails.Store(1)
	op, err := e.Begin(t.Context(), request("full", "full"), done)
	if err != nil {
		t.Fatal(err)
	}
	if said, err := e.Wait(t.Context(), op.GetId()); err != nil || said.GetState() != holdpointv1.OperationState_OPERATION_STATE_DONE || room.Load() != 1 {
		t.Errorf("%v, %v, room was made %d times", said, err, room.Load())
	}
	if err := e.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
