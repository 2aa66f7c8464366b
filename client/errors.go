package client

import (
	"context"
	"errors"
	"io"
	"net"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// Kind is one of the failures that users and programs tell apart.
type Kind = errdefs.Kind

// The kinds; docs/cli.md has their exit codes.
const (
	Internal          = errdefs.Internal
	Invalid           = errdefs.Invalid
	NotFound          = errdefs.NotFound
	AlreadyExists     = errdefs.AlreadyExists
	Conflict          = errdefs.Conflict
	RequestIDConflict = errdefs.RequestIDConflict
	MachineBusy       = errdefs.MachineBusy
	WrongState        = errdefs.WrongState
	Unsupported       = errdefs.Unsupported
	KindMismatch      = errdefs.KindMismatch
	Incompatible      = errdefs.Incompatible
	Referenced        = errdefs.Referenced
	OutcomeUnknown    = errdefs.OutcomeUnknown
	NoSpace           = errdefs.NoSpace
	Storage           = errdefs.Storage
	Deadline          = errdefs.Deadline
	Denied            = errdefs.Denied
	Interrupted       = errdefs.Interrupted
)

// Error is a failure the daemon reported, or of the way to it.
type Error struct {
	Kind Kind
	// Message is one line: what failed, which, and what to do.
	Message string
	cause   error
	// broken says that the way to the daemon failed, not the daemon.
	broken bool
}

// Error is the message.
func (e *Error) Error() string { return e.Message }

// Unwrap gives what it was decoded from.
func (e *Error) Unwrap() error { return e.cause }

// KindOf returns the kind of an error of this package, or of one made from
// it; nil has the kind "".
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return errdefs.KindOf(err)
}

// Unreachable reports whether err says that no daemon answers: none listens,
// or it went away during the call, which may then have had its effect.
func Unreachable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.broken
}

// errorOf is the failure an ended operation had; nil for none.
func errorOf(info *holdpointv1.ErrorInfo) error {
	if info == nil {
		return nil
	}
	return &Error{Kind: Kind(info.GetKind()), Message: info.GetMessage()}
}

// decode turns an error of Connect into an Error; others, and nil, stay.
func (d decoder) decode(err error) error {
	var done *Error
	if errors.As(err, &done) {
		return err
	}
	var remote *connect.Error
	if !errors.As(err, &remote) {
		return err
	}
	if interrupted(err) {
		return &Error{Kind: errdefs.KindOf(err), Message: "wait for the daemon: " + remote.Message(), cause: err}
	}
	if len(remote.Details()) == 0 && (!connect.IsWireError(err) || remote.Code() == connect.CodeUnavailable) {
		return d.unreachable(remote)
	}
	decoded := wire.Decode(remote)
	message := decoded.Error()
	if len(remote.Details()) == 0 && remote.Code() == connect.CodeUnimplemented {
		message = "the daemon does not know this call; it is of another build: run `holdpoint daemon stop` and try again"
	}
	return &Error{Kind: errdefs.KindOf(decoded), Message: message, cause: err}
}

// interrupted reports whether the caller's own context ended the call.
func interrupted(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// unreachable says how the way to the daemon failed. One that went away during
// the call interrupted it, as it does the operations that it was at.
func (d decoder) unreachable(err *connect.Error) *Error {
	var dial *net.OpError
	if errors.As(err, &dial) && dial.Op == "dial" {
		return &Error{Kind: Internal, Message: "no daemon answers at " + d.socket + "; start it with `holdpoint daemon start`", cause: err, broken: true}
	}
	return &Error{Kind: Interrupted, cause: err, broken: true, Message: "the daemon ended meanwhile (the connection to it at " +
		d.socket + " broke: " + err.Message() + "); look at what was done, and try again"}
}

// decoder is the interceptor that decodes the errors of every call.
type decoder struct{ socket string }

func (d decoder) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		res, err := next(ctx, req)
		return res, d.decode(err)
	}
}

func (d decoder) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		return &decodingConn{StreamingClientConn: next(ctx, spec), decoder: d}
	}
}

func (d decoder) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

type decodingConn struct {
	connect.StreamingClientConn
	decoder
}

// stream decodes an error of a stream, whose end Connect tells by io.EOF with
// the code Unknown.
func (d decoder) stream(err error) error {
	if errors.Is(err, io.EOF) && connect.CodeOf(err) == connect.CodeUnknown {
		return err
	}
	return d.decode(err)
}

func (c *decodingConn) Send(m any) error    { return c.stream(c.StreamingClientConn.Send(m)) }
func (c *decodingConn) Receive(m any) error { return c.stream(c.StreamingClientConn.Receive(m)) }
func (c *decodingConn) CloseRequest() error { return c.stream(c.StreamingClientConn.CloseRequest()) }

func (c *decodingConn) CloseResponse() error {
	return c.stream(c.StreamingClientConn.CloseResponse())
}
