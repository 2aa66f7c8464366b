package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// freezeTimeout bounds what a guest does before its file systems are frozen: its
// hooks, and writing out what waits. thawTimeout bounds what it does afterwards.
const (
	freezeTimeout = time.Minute
	thawTimeout   = 15 * time.Second
)

// AtRest has the guest hold back what it writes to its disks, calls change
// meanwhile, which took the time it gives, and tells how it was. Whatever becomes
// of us, the guest thaws by its own timer. On error change was not called, or
// failed, or what it did was not done at rest.
func (c *Conversation) AtRest(ctx context.Context, o *agentv1.FreezeStart, change func(context.Context) error) (*agentv1.FreezeThawed, int64, error) {
	limit := time.Duration(o.GetLimitMillis()) * time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout+limit+thawTimeout)
	defer cancel()
	stream := c.agent.Freeze(ctx)
	defer stream.CloseResponse() // the guest takes it for the end of the freeze
	answer, err := say(stream, &agentv1.FreezeRequest{Message: &agentv1.FreezeRequest_Start{Start: o}})
	var refused *connect.Error
	switch {
	case errors.As(err, &refused) && refused.Code() == connect.CodeUnimplemented && len(refused.Details()) == 0: // no such call
		err = errdefs.New(errdefs.Unsupported, "its agent is of an older holdpoint; stop and start the machine, or use --mode stopped")
	case err == nil && answer.GetFrozen() == nil:
		err = errdefs.New(errdefs.Internal, "the guest agent did not say that they are frozen")
	}
	if err != nil {
		return nil, 0, fmt.Errorf("freeze the guest's file systems: %w", wire.Decode(err))
	}
	frozen := time.Now()
	changing, stop := context.WithTimeout(ctx, limit)
	defer stop()
	err = change(changing)
	took := time.Since(frozen)
	answer, lost := say(stream, &agentv1.FreezeRequest{Message: &agentv1.FreezeRequest_Thaw{Thaw: &agentv1.FreezeThaw{}}})
	thawed := answer.GetThawed()
	switch {
	case err != nil:
		return thawed, int64(took), err
	case lost != nil || thawed == nil:
		return nil, int64(took), errdefs.New(errdefs.OutcomeUnknown, "thaw the guest's file systems: %v; they thaw by themselves, perhaps before the disk was kept", wire.Decode(lost))
	case thawed.GetTrouble() != "":
		return thawed, int64(took), errdefs.New(errdefs.Deadline, "keep the disk while the file systems are frozen: %s", thawed.GetTrouble())
	}
	return thawed, int64(took), nil
}

// say sends one message and gives the answer.
func say(stream *connect.BidiStreamForClient[agentv1.FreezeRequest, agentv1.FreezeResponse], m *agentv1.FreezeRequest) (*agentv1.FreezeResponse, error) {
	if err := stream.Send(m); err != nil && !errors.Is(err, io.EOF) { // then the answer says why
		return nil, err
	}
	return stream.Receive()
}
