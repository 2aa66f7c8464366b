package client

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
)

// Operation is one long-running request of the daemon's.
type Operation = holdpointv1.Operation

// reconnectLimit is how long WaitOperation looks for a daemon that went away;
// a daemon's start takes less than a second.
const reconnectLimit = 10 * time.Second

// retryDelay lies between two looks for a daemon that went away.
const retryDelay = 50 * time.Millisecond

// Ended reports whether the operation has its outcome.
func Ended(op *Operation) bool {
	switch op.GetState() {
	case holdpointv1.OperationState_OPERATION_STATE_DONE,
		holdpointv1.OperationState_OPERATION_STATE_FAILED,
		holdpointv1.OperationState_OPERATION_STATE_CANCELED:
		return true
	}
	return false
}

// Outcome is the error an ended operation ended with: nil when it is done,
// of the kind INTERRUPTED when it was canceled.
func Outcome(op *Operation) error {
	switch op.GetState() {
	case holdpointv1.OperationState_OPERATION_STATE_DONE:
		return nil
	case holdpointv1.OperationState_OPERATION_STATE_CANCELED:
		return &Error{Kind: Interrupted, Message: fmt.Sprintf("%s: canceled and undone", about(op))}
	case holdpointv1.OperationState_OPERATION_STATE_FAILED:
		if err := errorOf(op.GetError()); err != nil {
			return err
		}
		return &Error{Kind: Internal, Message: about(op) + ": failed without a reason; look into the daemon's log"}
	}
	return &Error{Kind: OutcomeUnknown, Message: fmt.Sprintf(
		"%s: goes on as operation %s; ask with `holdpoint operation wait %s`", about(op), op.GetId(), op.GetId())}
}

// Admit makes the call that begins an operation. When the daemon goes away
// during the call, it asks again, once: call must carry a request id, so that
// the effect comes once.
func (c *Client) Admit(ctx context.Context, call func(ctx context.Context) (*connect.Response[Operation], error)) (*Operation, error) {
	var op *Operation
	err := c.Ask(ctx, func(ctx context.Context) error {
		res, err := call(ctx)
		if err == nil {
			op = res.Msg
		}
		return err
	})
	if Unreachable(err) && ctx.Err() == nil && c.reconnect != nil {
		return nil, &Error{Kind: Interrupted, cause: err, broken: true, Message: "the daemon ended meanwhile, more than once (" + err.Error() +
			"); it is not known whether the operation began: see `holdpoint operation ls`"}
	}
	return op, err
}

// Ask makes a call that may be made twice, such as one without effect. When the
// daemon goes away during it, it is made once more, of the next one.
func (c *Client) Ask(ctx context.Context, call func(ctx context.Context) error) error {
	err := call(ctx)
	if !Unreachable(err) || ctx.Err() != nil || c.reconnect == nil {
		return err
	}
	if err := c.reconnect(ctx); err != nil {
		return err
	}
	return call(ctx)
}

// WaitOperation waits until the operation of the id has ended, and returns it
// with its Outcome. onProgress, which may be nil, gets every state on the way.
// It survives a restart of the daemon; one that stays away for 10 s is
// OUTCOME_UNKNOWN. When ctx ends the wait ends, and not the operation.
func (c *Client) WaitOperation(ctx context.Context, id string, onProgress func(*Operation)) (*Operation, error) {
	var last *Operation
	lostAt := time.Time{}
	for {
		op, err := c.watch(ctx, id, onProgress)
		if op != nil {
			last, lostAt = op, time.Time{}
		}
		switch {
		case last != nil && Ended(last):
			return last, Outcome(last)
		case ctx.Err() != nil:
			return last, ctx.Err()
		case err != nil && !Unreachable(err):
			return last, err
		}
		if lostAt.IsZero() {
			lostAt = time.Now()
		}
		if time.Since(lostAt) > reconnectLimit {
			return last, &Error{Kind: OutcomeUnknown, cause: err, Message: fmt.Sprintf(
				"operation %s: the daemon went away; ask for the outcome with `holdpoint operation wait %s`", id, id)}
		}
		if err := c.awaitDaemon(ctx); err != nil {
			return last, err
		}
	}
}

// watch follows one stream to its end and gives the last state it had.
func (c *Client) watch(ctx context.Context, id string, onProgress func(*Operation)) (*Operation, error) {
	stream, err := c.Operations.Watch(ctx, connect.NewRequest(&holdpointv1.GetOperationRequest{Operation: id}))
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var last *Operation
	for stream.Receive() {
		last = stream.Msg()
		if onProgress != nil {
			onProgress(last)
		}
		if Ended(last) {
			return last, nil
		}
	}
	return last, stream.Err()
}

// awaitDaemon returns when it is worth asking again.
func (c *Client) awaitDaemon(ctx context.Context) error {
	if c.reconnect != nil {
		if err := c.reconnect(ctx); err != nil {
			return err
		}
	}
	timer := time.NewTimer(retryDelay)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

func about(op *Operation) string {
	if op.GetMachine() == "" {
		return op.GetVerb()
	}
	return op.GetVerb() + " " + op.GetMachine()
}
