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
	return err != nil && connect.CodeOf(err) == connect.CodeUnavailable
}

// errorOf is the failure an ended operation had; nil for none.
func errorOf(info *holdpointv1.ErrorInfo) error {
	if info == nil {
		return nil
	}
	return &Error{Kind: Kind(info.GetKind()), Message: info.GetMessage()}
}

// decode turns an error of Connect into an Error. End-of-file and nil stay.
func (d decoder) decode(err error) error {
	if err == nil || errors.Is(err, io.EOF) && connect.CodeOf(err) == connect.CodeUnknown {
		return err
	}
	var done *Error
	if errors.As(err, &done) {
		return err
	}
	var remote *connect.Error
	if !errors.As(err, &remote) {
		return err
	}
	decoded := wire.Decode(remote)
	message := decoded.Error()
	if len(remote.Details()) == 0 {
		message = d.message(remote)
	}
	return &Error{Kind: errdefs.KindOf(decoded), Message: message, cause: remote}
}

// message puts an error without the daemon's own words into ours.
func (d decoder) message(err *connect.Error) string {
	var dial *net.OpError
	switch {
	case errors.As(err, &dial) && dial.Op == "dial":
		return "no daemon answers at " + d.socket + "; start it with `holdpoint daemon start`"
	case err.Code() == connect.CodeUnavailable:
		return "the connection to the daemon at " + d.socket + " broke: " + err.Message()
	case err.Code() == connect.CodeUnimplemented:
		return "the daemon does not know this call; it is of another build: run `holdpoint daemon stop` and try again"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "wait for the daemon: " + err.Message()
	}
	return err.Message()
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

func (c *decodingConn) Send(m any) error    { return c.decode(c.StreamingClientConn.Send(m)) }
func (c *decodingConn) Receive(m any) error { return c.decode(c.StreamingClientConn.Receive(m)) }
func (c *decodingConn) CloseRequest() error { return c.decode(c.StreamingClientConn.CloseRequest()) }

func (c *decodingConn) CloseResponse() error {
	return c.decode(c.StreamingClientConn.CloseResponse())
}
