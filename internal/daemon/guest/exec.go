//go:build linux

package guest

import (
	"context"
	"errors"
	"io"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/shellwords"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// expelling is ctx that ends, with the reason, when a restore makes the
// effect's generation history. Its goroutine ends with the returned cancel.
func expelling(ctx context.Context, door *hold.Admission) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-door.Expelled():
			cancel(door.Outdated())
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// startTimeout is how long a guest may take to begin a command that it was sent,
// or to connect to one. One that is slow needs seconds.
const startTimeout = 60 * time.Second

// errNotBegun ends a stream whose command the guest has not begun in time.
var errNotBegun = errors.New("the guest has not begun the command")

// beginning is ctx that ends with errNotBegun after startTimeout, unless begun was
// called. Its resources go with ctx.
func beginning(ctx context.Context) (limited context.Context, begun func()) {
	limited, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(startTimeout, func() { cancel(errNotBegun) })
	context.AfterFunc(limited, func() { timer.Stop() })
	return limited, func() { timer.Stop() }
}

// Exec runs or attaches to a command in a machine.
func (s *Service) Exec(ctx context.Context, stream *connect.BidiStream[holdpointv1.GuestExecRequest, holdpointv1.GuestExecResponse]) error {
	first, err := stream.Receive()
	if err != nil {
		return wire.Encode(errdefs.New(errdefs.Invalid, "exec: no command was sent: %w", err))
	}
	what, err := execName(first.GetMessage())
	if err != nil {
		return wire.Encode(err)
	}
	m, err := s.cfg.Catalog.ResolveMachine(ctx, first.GetMachine())
	if err != nil {
		return wire.Encode(err)
	}
	leave, err := s.take(m, what)
	if err != nil {
		return wire.Encode(err)
	}
	defer leave()
	door, run, err := s.enterMachine(ctx, m, hold.Request{
		Generation: first.GetGeneration(), Door: hold.Exec, What: what,
		Waiting: func(why string) { _ = stream.Send(&holdpointv1.GuestExecResponse{Waiting: why}) }, // a gone client is seen below
	})
	if err != nil {
		return wire.Encode(err)
	}
	defer door.Done()
	ctx, cancel := expelling(ctx, door)
	defer cancel()
	if start := first.GetMessage().GetStart(); start != nil {
		m.Spec.Defaults.Complete(start)
	}
	at := effect{door: door, run: run, what: what, command: first.GetMessage().GetAttach().GetCommandId()}
	ctx, begun := beginning(ctx)
	guest := run.Agent().Exec(ctx)
	if err := guest.Send(first.GetMessage()); err != nil {
		_, err = guest.Receive()
		return s.outcome(ctx, at, err)
	}
	// It ends with the client's stream, which ends when this call does.
	go execInput(ctx, stream, guest, door)
	err = execOutput(stream, guest, &at, begun)
	return s.outcome(ctx, at, err)
}

// mostCommands is how many commands of a machine clients may be at, those that wait
// for it included: each takes a stream of the one connection to its guest, which
// has 1000 and needs some for itself.
const mostCommands = 256

// take takes the place of one client at a command, until leave is called.
func (s *Service) take(m catalog.Machine, what string) (leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.commands[m.ID] >= mostCommands {
		return nil, errdefs.New(errdefs.MachineBusy, "%s: machine %s is at %d commands, the most at once; try again when one has ended, or start long ones with --detach", what, m.Name, mostCommands)
	}
	s.commands[m.ID]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.commands[m.ID]--; s.commands[m.ID] == 0 {
			delete(s.commands, m.ID)
		}
	}, nil
}

// execName names a command for people.
func execName(r *agentv1.ExecRequest) (string, error) {
	switch m := r.GetMessage().(type) {
	case *agentv1.ExecRequest_Start:
		if len(m.Start.GetArgv()) == 0 {
			return "", errdefs.New(errdefs.Invalid, "exec: the command is empty")
		}
		if shellwords.IsLoginShell(m.Start.GetArgv()) {
			return "shell", nil
		}
		return "exec " + shellwords.Quote(m.Start.GetArgv()...), nil
	case *agentv1.ExecRequest_Attach:
		return "attach " + m.Attach.GetCommandId(), nil
	}
	return "", errdefs.New(errdefs.Invalid, "exec: the first message is neither start nor attach")
}

// execInput carries what the client sends. Each message passes the gate.
func execInput(ctx context.Context, client *connect.BidiStream[holdpointv1.GuestExecRequest, holdpointv1.GuestExecResponse],
	guest *connect.BidiStreamForClient[agentv1.ExecRequest, agentv1.ExecResponse], door *hold.Admission,
) {
	for {
		message, err := client.Receive()
		if err != nil {
			// The end of the client's messages is the guest's to judge.
			_ = guest.CloseRequest()
			return
		}
		if door.Pass(ctx) != nil || guest.Send(message.GetMessage()) != nil {
			return
		}
	}
}

// execOutput carries what the guest sends until it ends, and notes which command
// it is. begun is called when the guest has begun it.
func execOutput(client *connect.BidiStream[holdpointv1.GuestExecRequest, holdpointv1.GuestExecResponse],
	guest *connect.BidiStreamForClient[agentv1.ExecRequest, agentv1.ExecResponse], at *effect, begun func(),
) error {
	defer guest.CloseResponse()
	for {
		message, err := guest.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		begun() // also by an exit, of a command that could not be started
		if id := message.GetStarted().GetCommandId(); id != "" {
			at.command = id
		}
		if why := at.door.Held(); why != "" && message.GetExit().GetCode() > 128 {
			// A signal that nobody in the machine sent.
			return errdefs.New(errdefs.Conflict, "the command was ended: %s", why)
		}
		if err := client.Send(&holdpointv1.GuestExecResponse{Message: message}); err != nil {
			return err
		}
	}
}

// ListCommands lists the commands in a machine.
func (s *Service) ListCommands(ctx context.Context, req *connect.Request[holdpointv1.ListGuestCommandsRequest]) (*connect.Response[agentv1.ListCommandsResponse], error) {
	if req.Msg.GetWake() {
		if err := s.wake(ctx, req.Msg.GetMachine()); err != nil {
			return nil, wire.Encode(err)
		}
	}
	run, err := s.look(ctx, req.Msg.GetMachine(), "attach")
	if err != nil {
		return nil, wire.Encode(err)
	}
	list, err := run.Agent().ListCommands(ctx, connect.NewRequest(&agentv1.ListCommandsRequest{}))
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(list.Msg), nil
}

// Facts tells what runs and listens in a machine.
func (s *Service) Facts(ctx context.Context, req *connect.Request[holdpointv1.GuestFactsRequest]) (*connect.Response[agentv1.FactsResponse], error) {
	run, err := s.look(ctx, req.Msg.GetMachine(), "facts")
	if err != nil {
		return nil, wire.Encode(err)
	}
	facts, err := run.Agent().Facts(ctx, connect.NewRequest(&agentv1.FactsRequest{}))
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(facts.Msg), nil
}
