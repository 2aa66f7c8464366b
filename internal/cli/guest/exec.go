// Package guest carries commands and files between this terminal and a
// machine, through the daemon. It parses no flags and prints nothing of its
// own.
package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Exec is one command in a machine: a new one, or one to attach to; or its console.
type Exec struct {
	// Verb is the user's, "exec", "shell", "attach" or "console", for messages.
	Verb, Machine string
	// Start or Attach says which command.
	Start  *agentv1.ExecStart
	Attach *agentv1.ExecAttach
	// Console is the machine's console instead; it has no size.
	Console bool
	// Stdin is sent to the command; nil ends its input at once, unless KeepInput
	// leaves it open for those who attach to the command later.
	Stdin          io.Reader
	KeepInput      bool
	Stdout, Stderr io.Writer
	// TTYWanted says that the command attached to has a terminal.
	TTYWanted bool
	// TTY is the terminal whose size the command's follows and that is raw
	// while it runs; nil for none.
	TTY *os.File
	// Leave ends the stream and not the command when Ctrl-P Ctrl-Q is typed, or
	// when the terminal that Stdin is goes away.
	Leave bool
	// Begun, which may be nil, is called when the command has started.
	Begun func()
	// Waiting is told why the command is held, in words.
	Waiting func(why string)
	// Signals are passed on to the command once it has started; an ending one
	// before that, or one that does not get through, ends the stream. Of a
	// command attached to, all but interrupts leave it.
	Signals <-chan os.Signal
}

// Result is what became of a command.
type Result struct {
	CommandID string
	PID       int32
	// Code is the exit code, as ExecExit has it.
	Code int32
	// Reason says why the command could not be started; empty otherwise.
	Reason string
	// Left says that the command goes on without us.
	Left bool
	// DroppedBytes of output nobody had read are lost.
	DroppedBytes uint64
}

// Run runs the command to its end, or until it was left. An error means that
// the end of the command is not known, or that there was none.
func (e *Exec) Run(ctx context.Context, c *client.Client) (Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	open := c.Guest.Exec
	if e.Console {
		open = c.Guest.Console
	}
	stream := open(ctx)
	if err := stream.Send(e.first()); err != nil && !errors.Is(err, io.EOF) {
		return Result{}, err
	}
	r := &running{
		exec: e, end: cancel, started: make(chan struct{}), done: make(chan struct{}),
		send: func(m *agentv1.ExecRequest) error {
			return stream.Send(&holdpointv1.GuestExecRequest{Message: m})
		},
	}
	r.workers.Go(func() { r.closeAtEnd(ctx, stream.CloseRequest) })
	r.begin()
	result, err := r.receive(stream.Receive)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		// A send that hangs in flow control ends with the call.
		cancel(err)
	}
	r.finish(stream.CloseRequest)
	cancel(nil)
	_ = stream.CloseResponse() // nothing more is expected
	if errors.Is(err, errLeft) {
		result.Left = true
		return result, nil
	}
	if client.Unreachable(err) {
		err = e.daemonEnded(result.CommandID)
	}
	return result, err
}

// daemonEnded says what became of a command, by its id if it is known to have
// started, whose stream ended with the daemon. What is not detached is hung up.
func (e *Exec) daemonEnded(id string) error {
	what := fmt.Sprintf("%s in %s: the daemon ended meanwhile", e.Verb, e.Machine)
	switch {
	case e.Console:
		return errdefs.New(errdefs.OutcomeUnknown, "%s; the machine runs on: `holdpoint console %s`", what, e.Machine)
	case e.Attach != nil:
		return errdefs.New(errdefs.OutcomeUnknown, "%s; the command goes on: `holdpoint attach %s %s`", what, e.Machine, e.Attach.GetCommandId())
	case id == "":
		return errdefs.New(errdefs.OutcomeUnknown, "%s; the command may have begun: look with `holdpoint exec %s -- ps`, and run it again", what, e.Machine)
	}
	return errdefs.New(errdefs.OutcomeUnknown, "%s, and the command was hung up; run it again, with --detach if it is to outlive that", what)
}

// errLeft ends the stream of a command that is to go on.
var errLeft = errors.New("left")

// noInput reports whether the command starts with nothing to read.
func (e *Exec) noInput() bool { return e.Stdin == nil && e.Attach == nil && !e.KeepInput }

func (e *Exec) first() *holdpointv1.GuestExecRequest {
	if e.Console {
		return &holdpointv1.GuestExecRequest{Machine: e.Machine}
	}
	message := &agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: e.Start}}
	if e.noInput() {
		e.Start.NoInput = true
	}
	if e.Attach != nil {
		message = &agentv1.ExecRequest{Message: &agentv1.ExecRequest_Attach{Attach: e.Attach}}
	}
	return &holdpointv1.GuestExecRequest{Machine: e.Machine, Message: message}
}

// running is an Exec under way: one goroutine reads input, one passes signals
// on, and the caller's receives.
type running struct {
	exec    *Exec
	end     context.CancelCauseFunc
	started chan struct{}
	done    chan struct{}
	workers sync.WaitGroup
	input   terminal.Input

	// mu serializes sends, as Connect's streams want it.
	mu   sync.Mutex
	send func(*agentv1.ExecRequest) error
}

func (r *running) begin() {
	if r.exec.Signals != nil {
		r.workers.Go(r.passSignals)
	}
	if r.exec.noInput() {
		_ = r.post(stdinEnd()) // for guests with an older agent; a broken stream says why in receive
	}
	if r.exec.Stdin == nil {
		return
	}
	r.input = terminal.NewInput(r.exec.Stdin)
	if _, isFile := r.exec.Stdin.(*os.File); isFile {
		r.workers.Go(r.passInput)
		return
	}
	// Such a Read cannot be interrupted; its goroutine ends with its stream.
	go r.passInput()
}

// closeAtEnd closes the request when ctx ends: HTTP/2's client does not heed its
// context while it waits for more of a request whose answer has begun.
func (r *running) closeAtEnd(ctx context.Context, closeRequest func() error) {
	select {
	case <-ctx.Done():
		r.mu.Lock()
		defer r.mu.Unlock()
		_ = closeRequest() // receive says why
	case <-r.done:
	}
}

func (r *running) finish(closeRequest func() error) {
	close(r.done)
	if r.input != nil {
		r.input.Stop()
	}
	r.workers.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = closeRequest() // the command has ended or is to be left
}

func (r *running) post(m *agentv1.ExecRequest) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.done:
		return io.ErrClosedPipe
	default:
		return r.send(m)
	}
}

func (r *running) receive(next func() (*holdpointv1.GuestExecResponse, error)) (Result, error) {
	var result Result
	for {
		res, err := next()
		if errors.Is(err, io.EOF) {
			return result, errdefs.New(errdefs.OutcomeUnknown,
				"%s in %s: the connection ended before the command did; look with `holdpoint exec %s -- ps`", r.exec.Verb, r.exec.Machine, r.exec.Machine)
		}
		if err != nil {
			return result, err
		}
		if why := res.GetWaiting(); why != "" && r.exec.Waiting != nil {
			r.exec.Waiting(why)
		}
		done, err := r.take(res.GetMessage(), &result)
		if done || err != nil {
			return result, err
		}
	}
}

// take handles one message; done says that it was the last.
func (r *running) take(m *agentv1.ExecResponse, result *Result) (done bool, err error) {
	switch m := m.GetMessage().(type) {
	case *agentv1.ExecResponse_Started:
		select {
		case <-r.started:
			return false, errdefs.New(errdefs.Internal, "%s in %s: the machine says twice that it began; its guest agent is broken", r.exec.Verb, r.exec.Machine)
		default:
		}
		result.CommandID, result.PID = m.Started.GetCommandId(), m.Started.GetPid()
		close(r.started)
		if r.exec.Begun != nil {
			r.exec.Begun()
		}
		if result.Left = r.exec.Start.GetDetach(); result.Left {
			return true, nil
		}
	case *agentv1.ExecResponse_Stdout:
		_, err = r.exec.Stdout.Write(m.Stdout)
	case *agentv1.ExecResponse_Stderr:
		_, err = r.exec.Stderr.Write(m.Stderr)
	case *agentv1.ExecResponse_Exit:
		result.Code, result.Reason = m.Exit.GetCode(), m.Exit.GetError()
		result.DroppedBytes = m.Exit.GetDroppedBytes()
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("write the command's output: %w", err)
	}
	return false, nil
}

func stdinEnd() *agentv1.ExecRequest {
	return &agentv1.ExecRequest{Message: &agentv1.ExecRequest_StdinEnd{StdinEnd: &agentv1.StdinEnd{}}}
}
