//go:build linux

package freeze

import (
	"context"
	"errors"
	"io"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Stream is that of one Freeze call.
type Stream = connect.BidiStream[agentv1.FreezeRequest, agentv1.FreezeResponse]

// Serve freezes for as long as the stream says so, is there, and the limit allows.
func (f *Freezer) Serve(ctx context.Context, stream *Stream) error {
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return errdefs.New(errdefs.Invalid, "freeze: the first message must be start")
	}
	frozen, err := f.Freeze(ctx, Order{
		Limit: time.Duration(start.GetLimitMillis()) * time.Millisecond, AllowHookFailure: start.GetAllowHookFailure(),
	})
	if err != nil {
		return err
	}
	err = stream.Send(&agentv1.FreezeResponse{Message: &agentv1.FreezeResponse_Frozen{Frozen: &agentv1.FreezeFrozen{}}})
	if err == nil {
		err = awaitThaw(ctx, stream)
	}
	report, lost := frozen.Thaw(ctx)
	if err != nil {
		return err // nobody listens
	}
	return stream.Send(&agentv1.FreezeResponse{Message: &agentv1.FreezeResponse_Thawed{Thawed: &agentv1.FreezeThawed{
		HooksNano: int64(report.Hooks), SyncNano: int64(report.Sync), FreezeNano: int64(report.Freeze), FrozenNano: int64(report.Frozen),
		HookFailure: text(report.Failed), Trouble: text(lost),
	}}})
}

// awaitThaw returns nil once the host has said so. A stream that breaks without
// an end is one whose context has ended.
func awaitThaw(ctx context.Context, stream *Stream) error {
	said := make(chan error, 1)
	go func() {
		m, err := stream.Receive()
		if err == nil && m.GetThaw() == nil {
			err = errdefs.New(errdefs.Invalid, "freeze: only thaw can follow")
		}
		said <- err
	}()
	select {
	case err := <-said:
		if errors.Is(err, io.EOF) {
			return errdefs.New(errdefs.Interrupted, "freeze: the host has gone")
		}
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
