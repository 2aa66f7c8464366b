package cli_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/tarstream"
	"github.com/holdpoint/holdpoint/internal/wire"
)

func spec() *holdpointv1.Spec {
	return &holdpointv1.Spec{MemoryBytes: 512 << 20, Cpus: 2, DiskBytes: 8 << 30, OnBoot: "nginx", Tmpfs: []string{"/scratch"}, Network: "none", Restart: "no"}
}

func machine(name string) *holdpointv1.Machine {
	return &holdpointv1.Machine{
		Id: "m0123456789abcde", Name: name, State: "running", Image: "debian", ImageBuildId: "b0123456789abcdef", Spec: spec(),
		Generation: 3, RunId: "r1", CreatedAt: ago(2*time.Hour + time.Minute), Routes: []*holdpointv1.Route{route()}, Accelerator: "tcg",
		QemuVersion: "7.2.22", QemuPid: 101, MonitorPid: 100, Head: "c3000000000000aa", ChainLength: 4,
	}
}

func image() *holdpointv1.Image {
	return &holdpointv1.Image{
		Name: "debian", BuildId: "b0123456789abcdef", Architecture: "x86_64", DiskBytes: 4 << 30, StoredBytes: 300 << 20,
		CreatedAt: ago(50 * time.Hour), KernelVersion: "6.1.0-30-cloud-amd64", Packages: []string{"nginx", "curl"}, UsedBy: 1,
	}
}

func route() *holdpointv1.Route {
	return &holdpointv1.Route{Host: "app.localhost", Url: "http://app.localhost:7780", Machine: "web", Port: 9090, MachineId: "m0123456789abcde", Protocol: "http"}
}

func checkpoint(n int) *holdpointv1.Checkpoint {
	c := &holdpointv1.Checkpoint{
		Id: fmt.Sprintf("c%d000000000000aa", n), Kind: "disk", Consistency: "stopped", Machine: "web", MachineId: "m0123456789abcde",
		CreatedAt: ago(time.Duration(5-n)*time.Hour + time.Minute), Spec: spec(), ImageBuildId: "b0123456789abcdef",
		Routes: []*holdpointv1.Route{route()}, DiskBytes: 6 << 20, Layers: []string{"l1", "l2"}, Current: n == 3,
	}
	switch n {
	case 1:
		c.Name, c.Message = "before-agent", "clean\x1b[31m state"
	case 2:
		c.Parent, c.Automatic, c.Consistency = "c1000000000000aa", true, "crash"
	case 3:
		c.Parent = "c1000000000000aa"
	}
	return c
}

type fakeImages struct {
	holdpointv1connect.UnimplementedImageServiceHandler
	f *fake
}

func (s *fakeImages) Build(_ context.Context, r *connect.Request[holdpointv1.BuildImageRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "image build", "", &holdpointv1.OperationResult{Image: image(), Notes: []string{"built without KVM"}})
}

func (s *fakeImages) Import(_ context.Context, r *connect.Request[holdpointv1.ImportImageRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "image import", "", &holdpointv1.OperationResult{Image: image(), Notes: []string{"its journal was replayed"}})
}

func (s *fakeImages) List(context.Context, *connect.Request[holdpointv1.ListImagesRequest]) (*connect.Response[holdpointv1.ListImagesResponse], error) {
	return connect.NewResponse(&holdpointv1.ListImagesResponse{Images: []*holdpointv1.Image{image()}}), nil
}

func (s *fakeImages) Get(_ context.Context, r *connect.Request[holdpointv1.GetImageRequest]) (*connect.Response[holdpointv1.Image], error) {
	if r.Msg.GetImage() != "debian" {
		return nil, notFound("image", r.Msg.GetImage())
	}
	return connect.NewResponse(image()), nil
}

func (s *fakeImages) Remove(_ context.Context, r *connect.Request[holdpointv1.RemoveImageRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "image rm", "", &holdpointv1.OperationResult{Image: image()})
}

type fakeMachines struct {
	holdpointv1connect.UnimplementedMachineServiceHandler
	f *fake
}

func (s *fakeMachines) Run(_ context.Context, r *connect.Request[holdpointv1.RunMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	name := r.Msg.GetName()
	if name == "" {
		name = "calm-otter"
	}
	return s.f.operation(r.Msg, "run", name, &holdpointv1.OperationResult{Machine: machine(name)})
}

func (s *fakeMachines) List(context.Context, *connect.Request[holdpointv1.ListMachinesRequest]) (*connect.Response[holdpointv1.ListMachinesResponse], error) {
	m := machine("web")
	if s.f.stopped {
		m.State = "stopped"
	}
	if s.f.full {
		m.Image = m.GetImageBuildId() // its name is another build's now
		m.Trouble = "machine web stands still because the host could not write its disk (free space in /layers: 3 MiB); free some space, it goes on by itself"
	}
	return connect.NewResponse(&holdpointv1.ListMachinesResponse{Machines: []*holdpointv1.Machine{m}}), nil
}

func (s *fakeMachines) Network(context.Context, *connect.Request[holdpointv1.GetMachineRequest]) (*connect.Response[holdpointv1.MachineNetwork], error) {
	return connect.NewResponse(&holdpointv1.MachineNetwork{Total: 1, Refusals: []*holdpointv1.NetworkRefusal{
		{Protocol: "dns", To: "db.example", Reason: "name of a refused address (127.0.0.1, loopback)", Count: 1, Last: ago(2 * time.Minute)},
	}}), nil
}

func (s *fakeMachines) Get(_ context.Context, r *connect.Request[holdpointv1.GetMachineRequest]) (*connect.Response[holdpointv1.Machine], error) {
	if r.Msg.GetMachine() != "web" {
		return nil, notFound("machine", r.Msg.GetMachine())
	}
	m := machine("web")
	if s.f.full {
		m.FullCheckpoints, m.ForkedFrom, m.RemoveOnStop = "userfaultfd", "c1000000000000aa", true
		m.Spec.SuspendAfterMillis, m.Spec.Network = 600_000, "open"
		m.IsolatedBy = []string{"files (Landlock ABI 7)", "system calls (seccomp)"}
		m.NotIsolated = []string{"namespaces: this host refuses them (operation not permitted)"}
		m.Trouble = "machine web stands still because the host could not write its disk (free space in /layers: 3 MiB); free some space, it goes on by itself"
	}
	if s.f.stopped {
		m.State = "stopped"
	}
	return connect.NewResponse(m), nil
}

func (s *fakeMachines) result() *holdpointv1.OperationResult {
	return &holdpointv1.OperationResult{Machine: machine("web")}
}

func (s *fakeMachines) Start(_ context.Context, r *connect.Request[holdpointv1.StartMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "start", "web", s.result())
}

func (s *fakeMachines) Stop(_ context.Context, r *connect.Request[holdpointv1.StopMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "stop", "web", s.result())
}

func (s *fakeMachines) Pause(_ context.Context, r *connect.Request[holdpointv1.PauseMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "pause", "web", s.result())
}

func (s *fakeMachines) Resume(_ context.Context, r *connect.Request[holdpointv1.ResumeMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "resume", "web", s.result())
}

func (s *fakeMachines) Remove(_ context.Context, r *connect.Request[holdpointv1.RemoveMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	result := s.result()
	if s.f.full {
		result.RemovedCheckpoints = 2
	}
	return s.f.operation(r.Msg, "rm", "web", result)
}

func (s *fakeMachines) PlanRestore(context.Context, *connect.Request[holdpointv1.RestoreMachineRequest]) (*connect.Response[holdpointv1.RestorePlan], error) {
	return connect.NewResponse(s.plan()), nil
}

func (s *fakeMachines) plan() *holdpointv1.RestorePlan {
	if s.f.plan != nil {
		return s.f.plan
	}
	return &holdpointv1.RestorePlan{
		Machine: "web", Checkpoint: checkpoint(1), Newer: []*holdpointv1.Checkpoint{checkpoint(3), checkpoint(2)}, Commands: []string{"sleep 100"},
		Effects: []*holdpointv1.Effect{{Kind: "copied-out", What: "/var/log/x", At: ago(90 * time.Minute)}},
		Routes: []*holdpointv1.RouteChange{
			{Host: "app.localhost", Change: "changed", Then: 8080, Now: 9090, Listening: "unknown"},
			{Host: "gone.localhost", Change: "removed", Then: 80, Listening: "unknown"},
			{Host: "other.localhost", Change: "foreign", Then: 80, Now: 80, Owner: "mail", Listening: "unknown"},
		},
	}
}

func (s *fakeMachines) Restore(_ context.Context, r *connect.Request[holdpointv1.RestoreMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	if r.Msg.GetKind() == "full" {
		return s.f.operation(r.Msg, "restore", "web", &holdpointv1.OperationResult{Machine: machine("web"), Restore: &holdpointv1.RestoreResult{
			Restored: fullCheckpoint(4), Safety: fullCheckpoint(5), UndoCommand: "holdpoint restore web c5000000000000aa --full",
			Plan: s.plan(), Generation: 4, DowntimeMs: 180, RunningMs: 170, AnswerMs: 410, ClosedSockets: 2, From: "memory-file",
		}})
	}
	restored := checkpoint(1)
	if s.f.full {
		restored = fullCheckpoint(4)
	}
	return s.f.operation(r.Msg, "restore", "web", &holdpointv1.OperationResult{Machine: machine("web"), Restore: &holdpointv1.RestoreResult{
		Restored: restored, Safety: checkpoint(2), UndoCommand: "holdpoint restore web c2000000000000aa --disk",
		Plan: s.plan(), Generation: 4, DowntimeMs: 4321,
	}})
}

type fakeCheckpoints struct {
	holdpointv1connect.UnimplementedCheckpointServiceHandler
	f *fake
}

func (s *fakeCheckpoints) Create(_ context.Context, r *connect.Request[holdpointv1.CreateCheckpointRequest]) (*connect.Response[holdpointv1.Operation], error) {
	if r.Msg.GetKind() == "full" {
		result := fullResult()
		if r.Msg.GetName() == "silent" {
			result.ReturnMs = 0
		}
		return s.f.operation(r.Msg, "checkpoint create", "web", &holdpointv1.OperationResult{Checkpoint: result})
	}
	if s.f.stopped {
		return s.f.operation(r.Msg, "checkpoint create", "web", &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{
			Checkpoint: checkpoint(1), DowntimeMs: 3, ReturnMs: 50, DurableMs: 50, CopyMs: 3, DiskBytes: 6 << 20,
		}})
	}
	return s.f.operation(r.Msg, "checkpoint create", "web", &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{
		Checkpoint: checkpoint(1), DowntimeMs: 5123.4, ReturnMs: 5200, DurableMs: 850, StopMs: 800, CopyMs: 23.4, BootMs: 4300, DiskBytes: 6 << 20,
	}})
}

func (s *fakeCheckpoints) List(context.Context, *connect.Request[holdpointv1.ListCheckpointsRequest]) (*connect.Response[holdpointv1.ListCheckpointsResponse], error) {
	list := []*holdpointv1.Checkpoint{checkpoint(3), checkpoint(2), checkpoint(1)}
	if s.f.full {
		list = append([]*holdpointv1.Checkpoint{fullCheckpoint(5), fullCheckpoint(4)}, list...)
	}
	return connect.NewResponse(&holdpointv1.ListCheckpointsResponse{Checkpoints: list}), nil
}

func (s *fakeCheckpoints) Get(_ context.Context, r *connect.Request[holdpointv1.GetCheckpointRequest]) (*connect.Response[holdpointv1.Checkpoint], error) {
	switch r.Msg.GetCheckpoint() {
	case "before-agent":
		return connect.NewResponse(checkpoint(1)), nil
	case "green":
		return connect.NewResponse(fullCheckpoint(4)), nil
	case "broken":
		return connect.NewResponse(fullCheckpoint(5)), nil
	}
	return nil, notFound("checkpoint", r.Msg.GetCheckpoint())
}

func (s *fakeCheckpoints) Remove(_ context.Context, r *connect.Request[holdpointv1.RemoveCheckpointRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "checkpoint rm", "web", &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{Checkpoint: checkpoint(1)}})
}

type fakeRoutes struct {
	holdpointv1connect.UnimplementedRouteServiceHandler
	f *fake
}

func (s *fakeRoutes) Expose(_ context.Context, r *connect.Request[holdpointv1.ExposeRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "expose", "web", &holdpointv1.OperationResult{Routes: []*holdpointv1.Route{route()}})
}

func (s *fakeRoutes) Unexpose(_ context.Context, r *connect.Request[holdpointv1.UnexposeRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "unexpose", "web", &holdpointv1.OperationResult{})
}

func (s *fakeRoutes) List(context.Context, *connect.Request[holdpointv1.ListRoutesRequest]) (*connect.Response[holdpointv1.ListRoutesResponse], error) {
	return connect.NewResponse(&holdpointv1.ListRoutesResponse{Routes: []*holdpointv1.Route{route()}}), nil
}

type fakeOperations struct {
	holdpointv1connect.UnimplementedOperationServiceHandler
	f *fake
}

func (s *fakeOperations) get(id string) (*holdpointv1.Operation, error) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	op := s.f.ops[id]
	if op == nil {
		return nil, notFound("operation", id)
	}
	return op, nil
}

func (s *fakeOperations) List(_ context.Context, r *connect.Request[holdpointv1.ListOperationsRequest]) (*connect.Response[holdpointv1.ListOperationsResponse], error) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	res := &holdpointv1.ListOperationsResponse{}
	for _, op := range s.f.ops {
		res.Operations = append(res.Operations, op)
	}
	return connect.NewResponse(res), nil
}

func (s *fakeOperations) Get(_ context.Context, r *connect.Request[holdpointv1.GetOperationRequest]) (*connect.Response[holdpointv1.Operation], error) {
	op, err := s.get(r.Msg.GetOperation())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(op), nil
}

func (s *fakeOperations) Watch(ctx context.Context, r *connect.Request[holdpointv1.GetOperationRequest], out *connect.ServerStream[holdpointv1.Operation]) error {
	op, err := s.get(r.Msg.GetOperation())
	if err != nil {
		return err
	}
	if err := out.Send(op); err != nil {
		return err
	}
	if s.f.running {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.f.finish:
		case <-s.f.canceled:
		}
	}
	return out.Send(s.f.end(op))
}

func (s *fakeOperations) Cancel(_ context.Context, r *connect.Request[holdpointv1.GetOperationRequest]) (*connect.Response[holdpointv1.Operation], error) {
	op, err := s.get(r.Msg.GetOperation())
	if err != nil {
		return nil, err
	}
	s.f.note(r.Msg)
	close(s.f.canceled)
	return connect.NewResponse(s.f.end(op)), nil
}

// fakeGuest runs commands that its argv[0] names, and has a folder for files.
type fakeGuest struct {
	holdpointv1connect.UnimplementedGuestServiceHandler
	f    *fake
	root string
	// begun is closed when "wait" has come; nil for nobody who cares.
	begun chan struct{}
	// inputs gets what comes first to "input".
	inputs chan string
	// refuse is the error every exec ends with; nil for none.
	refuse error
}

func (s *fakeGuest) ListCommands(context.Context, *connect.Request[holdpointv1.ListGuestCommandsRequest]) (*connect.Response[agentv1.ListCommandsResponse], error) {
	return connect.NewResponse(&agentv1.ListCommandsResponse{Commands: s.f.commands}), nil
}

func (s *fakeGuest) Upload(ctx context.Context, in *connect.ClientStream[holdpointv1.GuestUploadRequest]) (*connect.Response[agentv1.UploadResponse], error) {
	if !in.Receive() {
		return nil, in.Err()
	}
	start := in.Msg().GetMessage().GetStart()
	s.f.note(in.Msg())
	if in.Msg().GetMachine() != "web" {
		return nil, notFound("machine", in.Msg().GetMachine())
	}
	var archive bytes.Buffer
	for in.Receive() {
		archive.Write(in.Msg().GetMessage().GetData())
	}
	if in.Err() != nil {
		return nil, in.Err()
	}
	res, err := tarstream.UnpackAs(ctx, &archive, filepath.Join(s.root, start.GetPath()), tarstream.Options{})
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(&agentv1.UploadResponse{Files: res.Files, Bytes: res.Bytes}), nil
}

func (s *fakeGuest) Download(ctx context.Context, r *connect.Request[holdpointv1.GuestDownloadRequest], out *connect.ServerStream[agentv1.DownloadResponse]) error {
	return wire.Encode(tarstream.Pack(ctx, sender(func(p []byte) error {
		return out.Send(&agentv1.DownloadResponse{Data: p})
	}), filepath.Join(s.root, r.Msg.GetPath())))
}

type sender func([]byte) error

func (s sender) Write(p []byte) (int, error) { return len(p), s(p) }

func (s *fakeGuest) Logs(_ context.Context, r *connect.Request[holdpointv1.GuestLogsRequest], out *connect.ServerStream[holdpointv1.GuestLogsResponse]) error {
	s.f.note(r.Msg)
	for _, line := range []string{"booting\n", "login: \x1b[2J\n"} {
		if err := out.Send(&holdpointv1.GuestLogsResponse{Data: []byte(line)}); err != nil {
			return err
		}
	}
	return nil
}

// Exec knows: echo WORD, cat, fail CODE, missing, trap (waits for a signal and
// exits with 10 + it), hang (sends no exit), torn (ends as a
// daemon that is killed does), held (waits, then echoes), id of
// ExecAttach (replays, or is one of trap, hang, torn, input).
func (s *fakeGuest) Exec(ctx context.Context, stream *connect.BidiStream[holdpointv1.GuestExecRequest, holdpointv1.GuestExecResponse]) error {
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	s.f.note(first)
	if first.GetMachine() != "web" && !strings.HasPrefix(first.GetMachine(), "try-") {
		return notFound("machine", first.GetMachine())
	}
	if s.refuse != nil {
		return wire.Encode(s.refuse)
	}
	c := &fakeCommand{ctx: ctx, stream: stream, begun: s.begun, inputs: s.inputs}
	if attach := first.GetMessage().GetAttach(); attach != nil {
		if id := attach.GetCommandId(); id == "trap" || id == "hang" {
			return c.run(&agentv1.ExecStart{Argv: []string{id}})
		}
		c.started()
		switch attach.GetCommandId() {
		case "torn":
			panic(http.ErrAbortHandler)
		case "input":
			c.stdout("$ ")
			c.inputs <- c.firstInput()
			return nil
		}
		c.stdout("history of " + attach.GetCommandId() + "\n")
		c.exit(3, "")
		return nil
	}
	return c.run(first.GetMessage().GetStart())
}

type fakeCommand struct {
	ctx    context.Context
	begun  chan struct{}
	inputs chan<- string
	stream *connect.BidiStream[holdpointv1.GuestExecRequest, holdpointv1.GuestExecResponse]
}

func (c *fakeCommand) send(m *agentv1.ExecResponse) {
	_ = c.stream.Send(&holdpointv1.GuestExecResponse{Message: m}) // a client that left
}

func (c *fakeCommand) started() {
	c.send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Started{Started: &agentv1.ExecStarted{CommandId: "cmd-1", Pid: 77}}})
}

func (c *fakeCommand) stdout(s string) {
	c.send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stdout{Stdout: []byte(s)}})
}

func (c *fakeCommand) stderr(s string) {
	c.send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stderr{Stderr: []byte(s)}})
}

func (c *fakeCommand) exit(code int32, why string) {
	c.send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Exit{Exit: &agentv1.ExecExit{Code: code, Error: why}}})
}

func (c *fakeCommand) run(start *agentv1.ExecStart) error {
	argv := start.GetArgv()
	switch argv[0] {
	case "held":
		_ = c.stream.Send(&holdpointv1.GuestExecResponse{Waiting: "a checkpoint is made"}) // a client that left
		fallthrough
	case "echo":
		c.started()
		c.stdout(argv[1] + "\n")
		c.stderr("said\n")
		c.exit(0, "")
	case "torn":
		c.started()
		panic(http.ErrAbortHandler)
	case "index":
		c.started()
		// More than one line, the last without an end.
		c.stdout("one " + start.GetEnv()[0] + "\n\x1b[31mtw")
		c.stdout("o")
		c.stderr("said\n")
		c.exit(0, "")
	case "odd":
		c.started()
		if start.GetEnv()[0] == "FORK_INDEX=2" {
			c.exit(7, "")
		} else {
			c.exit(0, "")
		}
	case "lots":
		c.started()
		for range 3 {
			c.stdout(strings.Repeat("x", 1<<19))
		}
		c.exit(0, "")
	case "fail":
		c.started()
		var code int32
		fmt.Sscan(argv[1], &code)
		c.exit(code, "")
	case "missing":
		c.exit(127, "missing: not found")
	case "busy":
		return wire.Encode(errdefs.New(errdefs.WrongState, "exec in web: the machine is stopped; `holdpoint start web` boots it"))
	case "gone":
		return nil
	case "input":
		c.started()
		c.inputs <- c.firstInput()
	case "hang":
		c.started()
		c.stdout("here\n")
		<-c.ctx.Done()
	case "wait":
		close(c.begun)
		<-c.ctx.Done()
	default:
		c.started()
		c.input(argv[0])
	}
	return nil
}

// firstInput says what comes first: "data", "end", or "closed" for neither.
func (c *fakeCommand) firstInput() string {
	for {
		m, err := c.stream.Receive()
		switch {
		case err != nil:
			return "closed"
		case m.GetMessage().GetStdinEnd() != nil:
			return "end"
		case m.GetMessage().GetStdin() != nil:
			return "data"
		}
	}
}

// input serves cat and trap, which read.
func (c *fakeCommand) input(name string) {
	switch name {
	case "trap":
		c.stdout("ready\n")
	case "sh":
		c.stdout("$ ")
	}
	for {
		m, err := c.stream.Receive()
		if err != nil {
			return
		}
		switch m := m.GetMessage().GetMessage().(type) {
		case *agentv1.ExecRequest_Stdin:
			c.stdout(string(m.Stdin))
			if string(m.Stdin) == "exit\r" {
				c.exit(5, "")
				return
			}
		case *agentv1.ExecRequest_Resize:
			c.stdout(fmt.Sprintf("size %dx%d\n", m.Resize.GetRows(), m.Resize.GetCols()))
		case *agentv1.ExecRequest_StdinEnd:
			if name != "trap" {
				c.exit(0, "")
				return
			}
		case *agentv1.ExecRequest_Signal:
			c.exit(10+m.Signal, "")
			return
		}
	}
}

func writeFile(path, text string) error { return os.WriteFile(path, []byte(text), 0o640) }
