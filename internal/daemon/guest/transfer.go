//go:build linux

package guest

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// Upload unpacks a tar stream in a machine.
func (s *Service) Upload(ctx context.Context, stream *connect.ClientStream[holdpointv1.GuestUploadRequest]) (*connect.Response[agentv1.UploadResponse], error) {
	if !stream.Receive() {
		return nil, wire.Encode(errdefs.New(errdefs.Invalid, "cp: nothing was sent: %w", errors.Join(stream.Err(), io.ErrUnexpectedEOF)))
	}
	what := "cp to " + stream.Msg().GetMessage().GetStart().GetPath()
	door, run, err := s.enter(ctx, stream.Msg().GetMachine(), hold.Request{Door: hold.Copy, What: what})
	if err != nil {
		return nil, wire.Encode(err)
	}
	defer door.Done()
	ctx, cancel := expelling(ctx, door)
	defer cancel()
	at := effect{door: door, run: run, what: what}
	guest := run.Agent().Upload(ctx)
	for more := true; more; more = stream.Receive() {
		if guest.Send(stream.Msg().GetMessage()) != nil {
			break // CloseAndReceive says why
		}
	}
	if err := stream.Err(); err != nil {
		cancel()
		return nil, wire.Encode(err)
	}
	answer, err := guest.CloseAndReceive()
	if err != nil {
		return nil, s.outcome(ctx, at, err)
	}
	return connect.NewResponse(answer.Msg), nil
}

// Download packs a path in a machine as a tar stream.
func (s *Service) Download(ctx context.Context, req *connect.Request[holdpointv1.GuestDownloadRequest], stream *connect.ServerStream[agentv1.DownloadResponse]) error {
	what := "cp from " + req.Msg.GetPath()
	door, run, err := s.enter(ctx, req.Msg.GetMachine(), hold.Request{Door: hold.Copy, What: what})
	if err != nil {
		return wire.Encode(err)
	}
	defer door.Done()
	ctx, cancel := expelling(ctx, door)
	defer cancel()
	at := effect{door: door, run: run, what: what}
	call := ctx
	if send := wire.SendFrame(ctx); send != nil {
		call = wire.WithFrames(ctx, send)
	}
	guest, err := run.Agent().Download(call, connect.NewRequest(&agentv1.DownloadRequest{Path: req.Msg.GetPath()}))
	if err != nil {
		return s.outcome(ctx, at, err)
	}
	defer guest.Close()
	for guest.Receive() {
		if err := stream.Send(guest.Msg()); err != nil {
			return err
		}
	}
	if err := guest.Err(); err != nil {
		return s.outcome(ctx, at, err)
	}
	// What left the machine is out of a restore's reach, and is listed there.
	m, err := s.cfg.Catalog.ResolveMachine(ctx, req.Msg.GetMachine())
	if err == nil {
		err = s.cfg.Catalog.RecordEffect(ctx, catalog.Effect{MachineID: m.ID, Kind: catalog.CopiedOut, What: req.Msg.GetPath()})
	}
	return wire.Encode(err)
}

// Dial carries the bytes of one TCP connection to a port in a machine.
func (s *Service) Dial(ctx context.Context, stream *connect.BidiStream[holdpointv1.GuestDialRequest, holdpointv1.GuestDialResponse]) error {
	first, err := stream.Receive()
	if err != nil {
		return wire.Encode(errdefs.New(errdefs.Invalid, "dial: no port was sent: %w", err))
	}
	what := "connect"
	door, run, err := s.enter(ctx, first.GetMachine(), hold.Request{Door: hold.Dial, What: what})
	if err != nil {
		return wire.Encode(err)
	}
	defer door.Done()
	ctx, cancel := expelling(ctx, door)
	defer cancel()
	at := effect{door: door, run: run, what: what}
	guest := run.Agent().Dial(ctx)
	if err := guest.Send(first.GetMessage()); err != nil {
		_, err = guest.Receive()
		return s.outcome(ctx, at, err)
	}
	go func() {
		for {
			message, err := stream.Receive()
			if err != nil {
				_ = guest.CloseRequest() // the guest has ended or will
				return
			}
			if guest.Send(message.GetMessage()) != nil {
				return
			}
		}
	}()
	defer guest.CloseResponse()
	for {
		message, err := guest.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return s.outcome(ctx, at, err)
		}
		if err := stream.Send(&holdpointv1.GuestDialResponse{Message: message}); err != nil {
			return err
		}
	}
}
