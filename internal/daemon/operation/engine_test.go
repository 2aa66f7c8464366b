package operation_test

import (
	"context"
	"log/slog"
	"path/filepath"
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
	e := operation.New(c, slog.New(slog.DiscardHandler), nil)
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
