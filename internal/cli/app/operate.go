package app

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Admission is a call that begins an operation, with its request.
type Admission[Request any] func(context.Context, *connect.Request[Request]) (*connect.Response[client.Operation], error)

// Operate begins an operation and waits for its end. An interruption ends the
// wait only, except that one by the keyboard cancels an operation of a verb
// that Cancels: then the wait goes on, for the undo, until the second.
func Operate[Request any](ctx context.Context, a *App, c *client.Client, cancels bool, call Admission[Request], req *Request) (*client.Operation, error) {
	admitted := make(chan *client.Operation, 1)
	return a.Await(ctx, c, cancels, admitted, func(ctx context.Context, progress func(*client.Operation)) (*client.Operation, error) {
		op, err := c.Admit(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
			return call(ctx, connect.NewRequest(req))
		})
		if err != nil {
			return nil, err
		}
		admitted <- op
		if client.Ended(op) {
			return op, client.Outcome(op)
		}
		return c.WaitOperation(ctx, op.GetId(), progress)
	})
}

// RequestID is the id given by --request-id, or a new one.
func (a *App) RequestID() string {
	if a.requestID != "" {
		return a.requestID
	}
	return client.NewRequestID()
}

// Repeatable reports whether the request's id was given, so that the same
// command line again must make the same request.
func (a *App) Repeatable() bool { return a.requestID != "" }

type outcome struct {
	op  *client.Operation
	err error
}

// Await runs work, shows its progress, and heeds signals. admitted gives the
// operation once it is known.
func (a *App) Await(ctx context.Context, c *client.Client, cancels bool, admitted <-chan *client.Operation,
	work func(context.Context, func(*client.Operation)) (*client.Operation, error),
) (*client.Operation, error) {
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, terminal.Ending()...)
	defer signal.Stop(signals)

	show, hide := a.progress()
	defer hide()
	ended := make(chan outcome, 1)
	go func() {
		op, err := work(ctx, show)
		ended <- outcome{op, err}
	}()

	w := waiter{app: a, client: c, cancels: cancels, leave: leave, ended: ended}
	for {
		select {
		case w.op = <-admitted:
			admitted = nil
			w.heed(ctx)
		case s := <-signals:
			w.interrupted(s)
			w.heed(ctx)
		case o := <-ended:
			return w.result(ctx, o)
		}
	}
}

// waiter is the state of a wait that may be interrupted.
type waiter struct {
	app     *App
	client  *client.Client
	cancels bool
	leave   func()
	ended   <-chan outcome

	op *client.Operation
	// cancel and end are what was asked for: by the keyboard, of a verb that
	// cancels, and in any other way.
	cancel, end bool
	canceled    chan struct{}
}

// interrupted notes what a signal asks for; a second one ends the wait at once.
func (w *waiter) interrupted(s os.Signal) {
	switch {
	case w.cancel || w.end:
		w.leave()
	case w.cancels && s == os.Interrupt:
		w.cancel = true
		w.app.Say("canceling; what was done is undone (Ctrl-C again leaves at once)")
	default:
		w.end = true
	}
}

// heed does what was asked for as soon as the operation is known, so that its
// id can be told. The answer to a cancellation is not waited for here: the
// wait under way gets the outcome.
func (w *waiter) heed(ctx context.Context) {
	switch {
	case w.op == nil:
		return
	case w.end:
		w.leave()
	case w.cancel && w.canceled == nil:
		w.canceled = make(chan struct{})
		go w.askToCancel(ctx)
	}
}

func (w *waiter) askToCancel(ctx context.Context) {
	defer close(w.canceled)
	req := connect.NewRequest(&holdpointv1.GetOperationRequest{Operation: w.op.GetId()})
	if _, err := w.client.Operations.Cancel(ctx, req); err != nil && ctx.Err() == nil {
		w.app.Say("cancel operation " + w.op.GetId() + ": " + err.Error())
	}
}

// result is what the wait comes to.
func (w *waiter) result(ctx context.Context, o outcome) (*client.Operation, error) {
	left := ctx.Err() != nil
	w.leave()
	if w.canceled != nil {
		<-w.canceled
	}
	if !left || o.op != nil && client.Ended(o.op) {
		return o.op, o.err
	}
	if w.op == nil {
		return nil, errdefs.New(errdefs.Interrupted, "interrupted; it is not known whether the operation began: see `holdpoint operation ls`")
	}
	id := w.op.GetId()
	return nil, errdefs.New(errdefs.Interrupted,
		"no longer waiting; operation %s goes on: watch it with `holdpoint operation wait %s`, end it with `holdpoint operation cancel %s`", id, id, id)
}

// progress shows states of an operation on a terminal; hide ends that.
func (a *App) progress() (show func(*client.Operation), hide func()) {
	if a.Quiet || !terminal.Is(a.Config.Stderr) {
		return func(*client.Operation) {}, func() {}
	}
	p := terminal.StartProgress(a.Config.Stderr)
	a.setBar(p)
	return func(op *client.Operation) { p.Show(PhaseOf(op)) }, func() {
		a.setBar(nil)
		p.Stop()
	}
}

// ByteProgress shows bytes that went by on a terminal.
func (a *App) ByteProgress(what string) (moved func(int64), hide func()) {
	if a.Quiet || !terminal.Is(a.Config.Stderr) {
		return nil, func() {}
	}
	p := terminal.StartProgress(a.Config.Stderr)
	a.setBar(p)
	return func(total int64) { p.Show(what + "  " + view.Size(total)) }, func() {
		a.setBar(nil)
		p.Stop()
	}
}

func (a *App) setBar(p *terminal.Progress) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.bar = p
}

// PhaseOf says what an operation does now.
func PhaseOf(op *client.Operation) string {
	text := op.GetPhase()
	if text == "" {
		text = op.GetVerb()
	}
	text = view.Line(text)
	switch done, total := op.GetDoneBytes(), op.GetTotalBytes(); {
	case total > 0:
		text += fmt.Sprintf("  %s of %s (%d %%)", view.Size(done), view.Size(total), 100*done/total)
	case done > 0:
		text += "  " + view.Size(done)
	}
	return text
}

// Interruptible is a context that ends when we are asked to leave; for calls
// that are not operations.
func Interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, terminal.Ending()...)
}
