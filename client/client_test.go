package client_test

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server is a daemon whose answers a test decides.
type server struct {
	start func() (*holdpointv1.Operation, error)
	watch func(*connect.ServerStream[holdpointv1.Operation]) error
}

type machines struct {
	holdpointv1connect.UnimplementedMachineServiceHandler
	*server
}

type operations struct {
	holdpointv1connect.UnimplementedOperationServiceHandler
	*server
}

func (s machines) Start(context.Context, *connect.Request[holdpointv1.StartMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	op, err := s.start()
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(op), nil
}

func (s operations) Watch(_ context.Context, _ *connect.Request[holdpointv1.GetOperationRequest], out *connect.ServerStream[holdpointv1.Operation]) error {
	return s.watch(out)
}

func dial(t *testing.T, s *server, reconnect func(context.Context) error) *client.Client {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "hpcl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "daemon.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(holdpointv1connect.NewMachineServiceHandler(machines{server: s}))
	mux.Handle(holdpointv1connect.NewOperationServiceHandler(operations{server: s}))
	web := &http.Server{Handler: mux}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = web.Serve(listener) // Close ends it
	}()
	c, err := client.Dial(t.Context(), client.Options{Socket: socket, Reconnect: reconnect})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		web.Close()
		<-served
	})
	return c
}

func startCall(c *client.Client) func(context.Context) (*connect.Response[client.Operation], error) {
	return func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return c.Machines.Start(ctx, connect.NewRequest(&holdpointv1.StartMachineRequest{RequestId: "r", Machine: "web"}))
	}
}

func TestErrorsAreDecoded(t *testing.T) {
	s := &server{start: func() (*holdpointv1.Operation, error) {
		return nil, errdefs.New(errdefs.KindMismatch, "restore web: no")
	}}
	c := dial(t, s, nil)
	_, err := c.Admit(t.Context(), startCall(c))
	if client.KindOf(err) != client.KindMismatch || err.Error() != "restore web: no" || client.Unreachable(err) {
		t.Errorf("%v of kind %s", err, client.KindOf(err))
	}
	// Not served at all: another build.
	_, err = c.Machines.Pause(t.Context(), connect.NewRequest(&holdpointv1.PauseMachineRequest{}))
	if client.KindOf(err) != client.Unsupported || !strings.Contains(err.Error(), "another build") {
		t.Errorf("%v of kind %s", err, client.KindOf(err))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.Admit(ctx, startCall(c))
	if client.KindOf(err) != client.Interrupted || client.Unreachable(err) {
		t.Errorf("%v of kind %s", err, client.KindOf(err))
	}
}

func TestNobodyListens(t *testing.T) {
	c, err := client.Dial(t.Context(), client.Options{Socket: "/tmp/there is none.sock"})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Admit(t.Context(), startCall(c))
	if !client.Unreachable(err) || !strings.HasPrefix(err.Error(), "no daemon answers at /tmp/there is none.sock") {
		t.Errorf("%v", err)
	}
}

// A daemon that dies while it admits is asked again, with the same request.
func TestAdmitAgain(t *testing.T) {
	var calls, reconnects atomic.Int32
	s := &server{}
	s.start = func() (*holdpointv1.Operation, error) {
		if calls.Add(1) == 1 {
			panic(http.ErrAbortHandler) // breaks the connection
		}
		return &holdpointv1.Operation{Id: "op"}, nil
	}
	c := dial(t, s, func(context.Context) error {
		reconnects.Add(1)
		return nil
	})
	op, err := c.Admit(t.Context(), startCall(c))
	if err != nil || op.GetId() != "op" || calls.Load() != 2 || reconnects.Load() != 1 {
		t.Errorf("%v, %v, %d calls, %d reconnects", op, err, calls.Load(), reconnects.Load())
	}
}

// A wait goes on over broken connections and over streams that just end.
func TestWaitReconnects(t *testing.T) {
	var calls atomic.Int32
	s := &server{}
	s.watch = func(out *connect.ServerStream[holdpointv1.Operation]) error {
		op := &holdpointv1.Operation{Id: "op", Verb: "start", Machine: "web", State: holdpointv1.OperationState_OPERATION_STATE_RUNNING}
		n := calls.Add(1)
		if n == 4 {
			op.State = holdpointv1.OperationState_OPERATION_STATE_FAILED
			op.Error = wire.Info(errdefs.New(errdefs.NoSpace, "start web: disk is full"))
		}
		if err := out.Send(op); err != nil {
			return err
		}
		switch n {
		case 1:
			panic(http.ErrAbortHandler) // breaks the connection in the middle
		case 2:
			return nil
		case 3:
			return connect.NewError(connect.CodeUnavailable, http.ErrServerClosed)
		}
		return nil
	}
	c := dial(t, s, nil)
	states := 0
	op, err := c.WaitOperation(t.Context(), "op", func(*client.Operation) { states++ })
	if client.KindOf(err) != client.NoSpace || op.GetId() != "op" || states != 4 || calls.Load() != 4 {
		t.Errorf("%v, %v, %d states, %d calls", op, err, states, calls.Load())
	}
}

// The end of a wait is not the end of the operation, and says so by its kind.
func TestWaitEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	s := &server{watch: func(out *connect.ServerStream[holdpointv1.Operation]) error {
		_ = out.Send(&holdpointv1.Operation{Id: "op", State: holdpointv1.OperationState_OPERATION_STATE_RUNNING}) // the client is there
		<-release
		return nil
	}}
	c := dial(t, s, nil)
	op, err := c.WaitOperation(ctx, "op", func(*client.Operation) { cancel() })
	close(release)
	if client.KindOf(err) != client.Interrupted || op.GetId() != "op" || client.Ended(op) {
		t.Errorf("%v, %v", op, err)
	}
}

func TestOutcome(t *testing.T) {
	for state, kind := range map[holdpointv1.OperationState]client.Kind{
		holdpointv1.OperationState_OPERATION_STATE_DONE:        "",
		holdpointv1.OperationState_OPERATION_STATE_FAILED:      client.Internal,
		holdpointv1.OperationState_OPERATION_STATE_CANCELED:    client.Interrupted,
		holdpointv1.OperationState_OPERATION_STATE_RUNNING:     client.OutcomeUnknown,
		holdpointv1.OperationState_OPERATION_STATE_UNSPECIFIED: client.OutcomeUnknown,
	} {
		if got := client.KindOf(client.Outcome(&holdpointv1.Operation{State: state})); got != kind {
			t.Errorf("%s: %q, want %q", state, got, kind)
		}
	}
}

func TestRequestIDsDiffer(t *testing.T) {
	if a, b := client.NewRequestID(), client.NewRequestID(); a == b || len(a) != 24 {
		t.Errorf("%q, %q", a, b)
	}
}
