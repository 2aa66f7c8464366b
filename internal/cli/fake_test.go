package cli_test

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/cli"
	"github.com/holdpoint/holdpoint/internal/cli/launch"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// fake serves the API with one machine "web", one image "debian" and three
// checkpoints, and keeps what it was asked. It decides nothing a daemon would.
type fake struct {
	holdpointv1connect.UnimplementedDaemonServiceHandler
	images      fakeImages
	machines    fakeMachines
	guest       fakeGuest
	checkpoints fakeCheckpoints
	routes      fakeRoutes
	operations  fakeOperations

	mu       sync.Mutex
	requests []proto.Message
	// ops are the operations by id; those of fail have failed.
	ops map[string]*holdpointv1.Operation
	// fail is the error every operation ends with; nil for none.
	fail error
	// refuse is the error every admission ends with; nil for none.
	refuse error
	// running makes operations run until canceled, or until finish.
	running  bool
	finish   chan struct{}
	canceled chan struct{}
	// admitted gets the id of each operation.
	admitted chan string
	plan     *holdpointv1.RestorePlan
	// broken is how many more calls break the connection.
	broken   atomic.Int32
	commands []*agentv1.Command
	// stopped is whether the machine is.
	stopped bool
	// full adds full checkpoints to those there are, and to what is restored.
	full bool
	// forks are what a fork gives; nil for as many machines as are asked for.
	forks []*holdpointv1.ForkResult
}

func (f *fake) note(m proto.Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, m)
}

// asks takes the requests that came so far.
func (f *fake) asks() []proto.Message {
	f.mu.Lock()
	defer f.mu.Unlock()
	requests := f.requests
	f.requests = nil
	return requests
}

// asked is the last request of the type.
func asked[M proto.Message](t *testing.T, f *fake) M {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := len(f.requests) - 1; i >= 0; i-- {
		if m, ok := f.requests[i].(M); ok {
			return m
		}
	}
	var none M
	t.Fatalf("no request %T came", none)
	return none
}

// operation admits one that ends with the result.
func (f *fake) operation(req proto.Message, verb, machine string, result *holdpointv1.OperationResult) (*connect.Response[holdpointv1.Operation], error) {
	f.note(req)
	if f.refuse != nil {
		return nil, wire.Encode(f.refuse)
	}
	op := &holdpointv1.Operation{
		Id: "op-" + strings.ReplaceAll(verb, " ", "-"), Verb: verb, Machine: machine, RequestId: "r1",
		State: holdpointv1.OperationState_OPERATION_STATE_RUNNING, Phase: "stopping the guest", CreatedAt: ago(3 * time.Second),
		Result: result,
	}
	f.mu.Lock()
	f.ops[op.Id] = op
	f.mu.Unlock()
	// What is handed out must not change while it is sent.
	admitted := proto.CloneOf(op)
	admitted.Result = nil
	select {
	case f.admitted <- op.Id:
	default:
	}
	return connect.NewResponse(admitted), nil
}

func (f *fake) end(op *holdpointv1.Operation) *holdpointv1.Operation {
	f.mu.Lock()
	defer f.mu.Unlock()
	op = proto.CloneOf(op)
	op.State, op.EndedAt = holdpointv1.OperationState_OPERATION_STATE_DONE, ago(0)
	if f.fail != nil {
		op.State, op.Error, op.Result = holdpointv1.OperationState_OPERATION_STATE_FAILED, wire.Info(f.fail), nil
	}
	select {
	case <-f.canceled:
		op.State, op.Result = holdpointv1.OperationState_OPERATION_STATE_CANCELED, nil
	default:
	}
	f.ops[op.Id] = op
	return op
}

func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(time.Now().Add(-d)) }

func (f *fake) Status(context.Context, *connect.Request[holdpointv1.DaemonStatusRequest]) (*connect.Response[holdpointv1.DaemonStatusResponse], error) {
	return connect.NewResponse(&holdpointv1.DaemonStatusResponse{
		Pid: 4711, Build: launch.Build("test"), Home: "/home/of/fake", Proxy: "127.0.0.1:7780", Machines: 2, Running: 1, StartedAt: ago(90 * time.Minute),
	}), nil
}

func (f *fake) Doctor(context.Context, *connect.Request[holdpointv1.DoctorRequest]) (*connect.Response[holdpointv1.DoctorResponse], error) {
	return connect.NewResponse(&holdpointv1.DoctorResponse{Checks: []*holdpointv1.DoctorCheck{
		{Name: "qemu", State: "ok", Detail: "7.2.22"},
		{Name: "kvm", State: "degraded", Detail: "boots nothing; machines are slow", Fix: "add yourself to the group kvm"},
		{Name: "space", State: "failed", Detail: "12 MiB free", Fix: "make room"},
	}}), nil
}

// serve starts the fake for a home of its own, after it was set, and returns
// the home's folder.
func serve(t *testing.T, set ...func(*fake)) (*fake, string) {
	t.Helper()
	f := &fake{ops: map[string]*holdpointv1.Operation{}, finish: make(chan struct{}), canceled: make(chan struct{}), admitted: make(chan string, 8)}
	for _, s := range set {
		s(f)
	}
	dir := shortDir(t)
	serveAt(t, f, dir)
	return f, dir
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "hpc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func serveAt(t *testing.T, f *fake, dir string) {
	t.Helper()
	h, err := home.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Create(); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", h.Socket())
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: f.handler(), Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // Close ends it
	}()
	t.Cleanup(func() {
		server.Close()
		<-served
	})
}

func (f *fake) handler() http.Handler {
	f.images.f, f.machines.f, f.guest.f, f.checkpoints.f, f.routes.f, f.operations.f = f, f, f, f, f, f
	mux := http.NewServeMux()
	mux.Handle(holdpointv1connect.NewDaemonServiceHandler(f))
	mux.Handle(holdpointv1connect.NewImageServiceHandler(&f.images))
	mux.Handle(holdpointv1connect.NewMachineServiceHandler(&f.machines))
	mux.Handle(holdpointv1connect.NewGuestServiceHandler(&f.guest))
	mux.Handle(holdpointv1connect.NewCheckpointServiceHandler(&f.checkpoints))
	mux.Handle(holdpointv1connect.NewRouteServiceHandler(&f.routes))
	mux.Handle(holdpointv1connect.NewOperationServiceHandler(&f.operations))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.Path, "DaemonService") && f.broken.Add(-1) >= 0 {
			panic(http.ErrAbortHandler)
		}
		mux.ServeHTTP(w, r)
	})
}

// run is one command line with what it gave.
type run struct {
	code           int
	stdout, stderr string
}

func holdpoint(dir, stdin string, args ...string) run {
	var out, errs bytes.Buffer
	code := cli.Main(cli.Config{
		Version: "test", Args: append([]string{"--home", dir}, args...),
		Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &errs, Executable: "/nonexistent/holdpoint",
		RunDaemon: func(context.Context, cli.DaemonRun) error { return nil },
	})
	return run{code, out.String(), errs.String()}
}

func notFound(what, name string) error {
	return wire.Encode(errdefs.New(errdefs.NotFound, "%s %q: there is none; see `holdpoint ls`", what, name))
}
