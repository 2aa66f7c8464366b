package relay

import (
	"context"
	"errors"
	"io"
	"path"

	"connectrpc.com/connect"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// PlainWords makes a client of the machine's monitor tell its callers in plain
// words when the connection to the monitor ended in the middle of a call to the
// guest.
func PlainWords(machine string) connect.ClientOption {
	return connect.WithInterceptors(plainWords{machine})
}

// plainWords tells in plain words when the connection to the monitor ended in
// the middle of a call to the guest, which the transport tells in its own.
type plainWords struct{ machine string }

// said gives err, or unavailable if it is neither the guest's nor the
// monitor's word, nor our caller's own doing.
func (p plainWords) said(ctx context.Context, procedure string, err error) error {
	if err == nil || errors.Is(err, io.EOF) || connect.IsWireError(err) || ctx.Err() != nil {
		return err
	}
	switch connect.CodeOf(err) {
	case connect.CodeCanceled, connect.CodeDeadlineExceeded, connect.CodeResourceExhausted, connect.CodeUnimplemented:
		return err
	}
	return Unavailable(errdefs.New(errdefs.OutcomeUnknown,
		"the monitor of machine %s went away while the call %s was under way; it may have had its effect", p.machine, path.Base(procedure)))
}

// WrapUnary is that of connect.Interceptor.
func (p plainWords) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, req)
		return resp, p.said(ctx, req.Spec().Procedure, err)
	}
}

// WrapStreamingClient is that of connect.Interceptor.
func (p plainWords) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		return plainConn{StreamingClientConn: next(ctx, spec), ctx: ctx, words: p}
	}
}

// WrapStreamingHandler is that of connect.Interceptor; we handle none.
func (plainWords) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

type plainConn struct {
	connect.StreamingClientConn
	ctx   context.Context
	words plainWords
}

// Receive is that of connect.StreamingClientConn.
func (c plainConn) Receive(msg any) error {
	return c.words.said(c.ctx, c.Spec().Procedure, c.StreamingClientConn.Receive(msg))
}
