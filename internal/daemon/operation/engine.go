// Package operation runs the long-running requests of a daemon: each is
// admitted in the journal before it has an effect, holds leases, runs on its
// own deadline whatever becomes of its client, and ends with a recorded
// outcome. What an operation does is its caller's.
package operation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// leaseSlack is how much longer than its operation a lease lives, so that the
// undo of one that ran into its deadline still holds it.
const leaseSlack = 5 * time.Minute

// cancelTimeout is how long canceled operations get when the engine closes.
const cancelTimeout = 5 * time.Second

// errCanceled is the cause of a context whose operation was canceled.
var errCanceled = errdefs.New(errdefs.Interrupted, "the operation was canceled")

// Journal is where operations and their leases are recorded.
type Journal interface {
	Admit(ctx context.Context, op catalog.Operation, ttl time.Duration, claims ...catalog.Claim) (admitted catalog.Operation, existing bool, err error)
	UpdateOperation(ctx context.Context, id string, p catalog.Progress) error
	Finish(ctx context.Context, id string, out catalog.Outcome) error
	GetOperation(ctx context.Context, id string) (catalog.Operation, error)
}

// Request is what is asked for.
type Request struct {
	// ID is chosen by the caller, at most 256 bytes; empty: one is made.
	ID string
	// Verb is as the command line names it.
	Verb string
	// Options are all of the request's options; the same ID with others is
	// refused.
	Options proto.Message
	// MachineID and Machine are empty for an operation on no machine.
	MachineID string
	Machine   string
	// Claims are leased to the operation.
	Claims []catalog.Claim
	// Timeout is its own deadline, from its admission.
	Timeout time.Duration
}

// Body does the work. Its context ends at the operation's deadline or when it
// is canceled, never with the client.
type Body func(ctx context.Context, w *Work) (*holdpointv1.OperationResult, error)

// Config is what an Engine works with.
type Config struct {
	Journal Journal
	Log     *slog.Logger
	// Ended is called after each operation gave back all it held; nil for nobody.
	Ended func(context.Context)
	// Room makes some room where an outcome finds none to be recorded in, and
	// reports whether it did; nil for none.
	Room func() bool
	// Settle finishes or undoes an operation by its phase, as the next start would:
	// one that has failed, when that could not be recorded at first. nil for nothing.
	Settle func(ctx context.Context, w *Work, op catalog.Operation) (*holdpointv1.OperationResult, error)
}

// Engine runs operations. Close waits for them.
type Engine struct {
	Config

	mu      sync.Mutex
	running map[string]*Work
	// unrecorded are the operations whose outcome is to be recorded yet.
	unrecorded map[string]*unrecorded
	// last is when an operation ended last.
	last   time.Time
	closed bool
	wg     sync.WaitGroup
	// later are those that wait for putOff, until closing is closed.
	later   sync.WaitGroup
	closing chan struct{}
}

// New returns an engine over a journal.
func New(cfg Config) *Engine {
	return &Engine{Config: cfg, running: map[string]*Work{}, unrecorded: map[string]*unrecorded{}, closing: make(chan struct{})}
}

// Begin admits the operation and starts its body. The returned operation runs,
// or is the one that was admitted with the same request id and options before.
func (e *Engine) Begin(ctx context.Context, r Request, body Body) (*holdpointv1.Operation, error) {
	op, err := record(r)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, errdefs.New(errdefs.WrongState, "%s: the daemon is stopping; try again when it has started", r.Verb)
	}
	admitted, existing, err := e.Journal.Admit(ctx, op, r.Timeout+leaseSlack, r.Claims...)
	if err != nil {
		return nil, err
	}
	if existing {
		if w := e.running[admitted.ID]; w != nil {
			return w.Snapshot(), nil
		}
		return Describe(admitted), nil
	}
	return e.start(admitted, r.Timeout, body), nil
}

// Resume goes on with an operation that an earlier daemon left unfinished.
func (e *Engine) Resume(op catalog.Operation, timeout time.Duration, body Body) *holdpointv1.Operation {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.start(op, timeout, body)
}

func (e *Engine) start(op catalog.Operation, timeout time.Duration, body Body) *holdpointv1.Operation {
	ctx, cancel := context.WithCancelCause(context.Background())
	ctx, stop := context.WithTimeoutCause(ctx, timeout,
		errdefs.New(errdefs.Deadline, "%s: not done within %s", op.Verb, timeout))
	w := &Work{engine: e, record: op, view: Describe(op), cancel: cancel, changed: make(chan struct{})}
	e.running[op.ID] = w
	e.wg.Go(func() {
		defer cancel(nil)
		defer stop()
		result, err := body(ctx, w)
		e.finish(ctx, w, result, err)
	})
	return w.Snapshot()
}

// finish records the outcome. The record is made on a context of its own: an
// operation that ran into its deadline has an outcome too.
func (e *Engine) finish(ctx context.Context, w *Work, result *holdpointv1.OperationResult, failure error) {
	if cause := context.Cause(ctx); failure != nil && cause != nil && errors.Is(failure, ctx.Err()) {
		failure = cause
	}
	w.mu.Lock()
	if result == nil {
		result = &holdpointv1.OperationResult{}
	}
	result.Notes = append(result.Notes, w.notes...)
	id := w.record.ID
	w.mu.Unlock()

	out := catalog.Outcome{State: catalog.OperationDone, Err: failure}
	switch {
	case failure != nil && errors.Is(failure, errCanceled):
		out.State = catalog.OperationCanceled
	case failure != nil:
		out.State = catalog.OperationFailed
	}
	encoded, err := protojson.Marshal(result)
	if err != nil {
		e.Log.Error("encode operation result", "operation", id, "error", err)
	}
	out.Result = encoded
	e.settle(context.WithoutCancel(ctx), w, out)
}

// settle records the outcome and shows it. Where it cannot be recorded the
// watchers are told so, and it is tried again.
func (e *Engine) settle(ctx context.Context, w *Work, out catalog.Outcome) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	id := w.ID()
	var done catalog.Operation
	err := e.finishRecord(ctx, id, out)
	if err == nil {
		done, err = e.Journal.GetOperation(ctx, id)
	}
	if err != nil {
		e.Log.Error("record operation outcome", "operation", id, "error", err)
		done = w.record
		done.State, done.EndedAt, done.Result = catalog.OperationFailed, time.Now(), out.Result
		done.ErrorKind = errdefs.OutcomeUnknown
		done.ErrorMessage = fmt.Sprintf("%s: its outcome could not be recorded (%v), which is tried again; see holdpoint operation show %s", done.Verb, err, id)
	}
	e.mu.Lock()
	delete(e.running, id)
	e.last = time.Now()
	if err == nil {
		delete(e.unrecorded, id)
	} else {
		e.putOff(w.record, out)
	}
	e.mu.Unlock()
	w.update(func() { w.view = Describe(done) })
	if e.Ended != nil {
		e.Ended(ctx)
	}
}

// finishRecord records an outcome, and makes room for that if need be.
func (e *Engine) finishRecord(ctx context.Context, id string, out catalog.Outcome) error {
	err := e.Journal.Finish(ctx, id, out)
	if errdefs.Is(err, errdefs.NoSpace) && e.Room != nil && e.Room() {
		err = e.Journal.Finish(ctx, id, out)
	}
	return err
}

// Get returns an operation as it is now.
func (e *Engine) Get(ctx context.Context, id string) (*holdpointv1.Operation, error) {
	if w := e.work(id); w != nil {
		return w.Snapshot(), nil
	}
	op, err := e.Journal.GetOperation(ctx, id)
	if err != nil {
		return nil, err
	}
	return Describe(op), nil
}

func (e *Engine) work(id string) *Work {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.running[id]
}

// Watch calls send with the operation now and after each change, the last time
// when it has ended.
func (e *Engine) Watch(ctx context.Context, id string, send func(*holdpointv1.Operation) error) error {
	w := e.work(id)
	if w == nil {
		op, err := e.Get(ctx, id)
		if err != nil {
			return err
		}
		return send(op)
	}
	for {
		w.mu.Lock()
		view, changed := proto.CloneOf(w.view), w.changed
		w.mu.Unlock()
		if err := send(view); err != nil {
			return err
		}
		if Ended(view) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("watch operation %s: %w", id, context.Cause(ctx))
		}
	}
}

// Quiet is how long no operation has run; 0 while one does.
func (e *Engine) Quiet() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.running) > 0 {
		return 0
	}
	return time.Since(e.last)
}

// Wait returns the operation when it has ended.
func (e *Engine) Wait(ctx context.Context, id string) (*holdpointv1.Operation, error) {
	var last *holdpointv1.Operation
	err := e.Watch(ctx, id, func(op *holdpointv1.Operation) error {
		last = op
		return nil
	})
	return last, err
}

// Run runs an operation that nobody waits for but its caller, and gives why it failed.
func (e *Engine) Run(ctx context.Context, r Request, body Body) error {
	op, err := e.Begin(ctx, r, body)
	if err == nil {
		op, err = e.Wait(ctx, op.GetId())
	}
	if err != nil {
		return err
	}
	if failure := op.GetError(); failure != nil {
		return errdefs.New(errdefs.Kind(failure.GetKind()), "%s", failure.GetMessage())
	}
	return nil
}

// Cancel asks a running operation to end and waits until it has.
func (e *Engine) Cancel(ctx context.Context, id string) (*holdpointv1.Operation, error) {
	if w := e.work(id); w != nil {
		w.cancel(errCanceled)
	}
	return e.Wait(ctx, id)
}

// Close refuses new operations and waits until ctx ends for those that run;
// then it cancels them and waits a moment more. What runs even longer is
// settled at the next start.
func (e *Engine) Close(ctx context.Context) error {
	e.mu.Lock()
	if !e.closed {
		e.closed = true
		close(e.closing)
	}
	e.mu.Unlock()
	e.later.Wait()
	done := make(chan struct{})
	go func() {
		e.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	e.mu.Lock()
	for _, w := range e.running {
		w.cancel(errdefs.New(errdefs.Interrupted, "the daemon was stopped"))
	}
	e.mu.Unlock()
	select {
	case <-done:
		return nil
	case <-time.After(cancelTimeout):
		return fmt.Errorf("wait for operations: %w", context.Cause(ctx))
	}
}

func record(r Request) (catalog.Operation, error) {
	if len(r.ID) > 256 || strings.ContainsFunc(r.ID, unicode.IsControl) {
		return catalog.Operation{}, errdefs.New(errdefs.Invalid, "%s: a request id has at most 256 bytes and no control characters", r.Verb)
	}
	options, err := protojson.Marshal(r.Options)
	if err != nil {
		return catalog.Operation{}, fmt.Errorf("%s: encode options: %w", r.Verb, err)
	}
	id := durable.NewID()
	if r.ID == "" {
		r.ID = id
	}
	return catalog.Operation{
		ID: id, RequestID: r.ID, Verb: r.Verb, Options: options,
		MachineID: r.MachineID, MachineName: r.Machine, CreatedAt: time.Now(),
	}, nil
}
