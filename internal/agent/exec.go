//go:build linux

package agent

import (
	"context"
	"errors"
	"io"
	"syscall"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent/command"
	"github.com/holdpoint/holdpoint/internal/agent/conversation"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

type execStream = connect.BidiStream[agentv1.ExecRequest, agentv1.ExecResponse]

// Exec starts a command or attaches to one, and carries its input and output
// until it has ended or the stream is closed. A command whose stream is closed
// is hung up unless it is detached. One whose stream ended with the whole
// conversation goes on as if it were: the guest may be a restored one, in
// which the other side vanished without a word, and its user may come back.
func (a *Agent) Exec(ctx context.Context, stream *execStream) error {
	if err := a.ready(); err != nil {
		return wire.Encode(err)
	}
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	var c *command.Command
	var out *command.Reader
	owner := false
	switch {
	case first.GetStart() != nil:
		c, err = a.start(first.GetStart())
		var failed *command.StartError
		if errors.As(err, &failed) {
			return sendExit(stream, &agentv1.ExecExit{Code: int32(failed.Code), Error: failed.Error()})
		}
		if err == nil {
			owner = !c.Detached
			out = c.Attach(true)
			if first.GetStart().GetNoInput() {
				c.CloseInput()
			}
		}
	case first.GetAttach() != nil:
		c, err = a.commands.Get(first.GetAttach().GetCommandId())
		if err == nil {
			out = c.Attach(!first.GetAttach().GetNoHistory())
			c.Resize(first.GetAttach().GetSize().GetRows(), first.GetAttach().GetSize().GetCols())
		}
	default:
		err = errdefs.New(errdefs.Invalid, "exec: the first message must be start or attach")
	}
	if err != nil {
		return wire.Encode(err)
	}
	defer out.Close()
	a.streams.Go(func() { a.carryInput(stream, c, owner) })
	err = a.carryOutput(ctx, stream, c, out, first.GetStart().GetDetach())
	switch {
	case err == nil || !owner:
	case conversation.Over(ctx):
		a.commands.Keep(c)
	default:
		a.commands.Forget(c)
		c.HangUp()
	}
	return err
}

func (a *Agent) start(s *agentv1.ExecStart) (*command.Command, error) {
	return a.commands.Start(command.Spec{
		Argv: s.GetArgv(), Env: s.GetEnv(), Dir: s.GetCwd(), User: s.GetUser(),
		TTY: s.GetTty(), Rows: s.GetSize().GetRows(), Cols: s.GetSize().GetCols(),
		Detached: s.GetDetach(),
	})
}

// carryInput ends when the stream does, which may be after the handler's
// return. The end of the requests is the end of the input, but for a detached
// command, which others may attach to.
func (a *Agent) carryInput(stream *execStream, c *command.Command, owner bool) {
	for {
		m, err := stream.Receive()
		if err != nil {
			if errors.Is(err, io.EOF) && owner {
				c.CloseInput()
			}
			return
		}
		switch m := m.GetMessage().(type) {
		case *agentv1.ExecRequest_Stdin:
			c.Write(m.Stdin)
		case *agentv1.ExecRequest_StdinEnd:
			c.CloseInput()
		case *agentv1.ExecRequest_Resize:
			c.Resize(m.Resize.GetRows(), m.Resize.GetCols())
		case *agentv1.ExecRequest_Signal:
			if err := c.Signal(syscall.Signal(m.Signal)); err != nil {
				a.cfg.Log.Warn("signal command", "command", c.ID, "error", err)
			}
		}
	}
}

// carryOutput ends with the command, whose exit code was read then. A detached
// command's is left for those that attach: who started it goes away as soon as
// it runs, at the same moment as a short one ends.
func (a *Agent) carryOutput(ctx context.Context, stream *execStream, c *command.Command, out *command.Reader, detaching bool) error {
	if err := stream.Send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Started{
		Started: &agentv1.ExecStarted{CommandId: c.ID, Pid: int32(c.PID())},
	}}); err != nil {
		return err
	}
	for {
		p, stderr, err := out.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		m := &agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stdout{Stdout: p}}
		if stderr {
			m.Message = &agentv1.ExecResponse_Stderr{Stderr: p}
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	<-c.Done()
	if err := sendExit(stream, &agentv1.ExecExit{Code: int32(c.Code()), DroppedBytes: c.Dropped()}); err != nil {
		return err
	}
	if !detaching {
		a.commands.Forget(c)
	}
	return nil
}

func sendExit(stream *execStream, exit *agentv1.ExecExit) error {
	return stream.Send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Exit{Exit: exit}})
}

// ListCommands lists what was started through Exec.
func (a *Agent) ListCommands(context.Context, *connect.Request[agentv1.ListCommandsRequest]) (*connect.Response[agentv1.ListCommandsResponse], error) {
	resp := &agentv1.ListCommandsResponse{}
	for _, c := range a.commands.List() {
		m := &agentv1.Command{
			Id: c.ID, Pid: int32(c.PID()), Argv: c.Argv, Detached: c.OnItsOwn(), Tty: c.TTY,
			StartedUnixNano: c.Started.UnixNano(), Attached: c.Attached(), Running: true,
		}
		select {
		case <-c.Done():
			m.Running, m.ExitCode = false, int32(c.Code())
		default:
		}
		resp.Commands = append(resp.Commands, m)
	}
	return connect.NewResponse(resp), nil
}
