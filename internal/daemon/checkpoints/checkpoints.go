//go:build linux

// Package checkpoints serves CheckpointService: it admits what is asked of
// checkpoints and shows them. How one is taken is said elsewhere.
package checkpoints

import (
	"context"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// Config is what a Service works with.
type Config struct {
	*admission.Desk
}

// Service serves CheckpointService.
type Service struct {
	Config
	holdpointv1connect.UnimplementedCheckpointServiceHandler
}

// New returns a Service.
func New(cfg Config) *Service { return &Service{Config: cfg} }

// List gives checkpoints, newest first.
func (s *Service) List(ctx context.Context, req *connect.Request[holdpointv1.ListCheckpointsRequest]) (*connect.Response[holdpointv1.ListCheckpointsResponse], error) {
	machineID, err := s.MachineID(ctx, req.Msg.GetMachine())
	if err != nil {
		return nil, wire.Encode(err)
	}
	list, err := s.Catalog.ListCheckpoints(ctx, machineID)
	if err != nil {
		return nil, wire.Encode(err)
	}
	out := &holdpointv1.ListCheckpointsResponse{}
	machines := map[string]catalog.Machine{}
	for _, k := range list {
		m, known := machines[k.MachineID]
		if !known {
			if m, err = s.Catalog.GetMachine(ctx, k.MachineID); err != nil {
				return nil, wire.Encode(err)
			}
			machines[k.MachineID] = m
		}
		view, err := s.View.Checkpoint(k, m)
		if err != nil {
			return nil, wire.Encode(err)
		}
		out.Checkpoints = append(out.Checkpoints, view)
	}
	return connect.NewResponse(out), nil
}

// Get gives one checkpoint.
func (s *Service) Get(ctx context.Context, req *connect.Request[holdpointv1.GetCheckpointRequest]) (*connect.Response[holdpointv1.Checkpoint], error) {
	k, err := s.Checkpoint(ctx, req.Msg.GetMachine(), req.Msg.GetCheckpoint())
	if err != nil {
		return nil, wire.Encode(err)
	}
	view, err := s.View.CheckpointNow(ctx, k)
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(view), nil
}

// Remove forgets a checkpoint's record; its layers go when nothing else needs them.
func (s *Service) Remove(ctx context.Context, req *connect.Request[holdpointv1.RemoveCheckpointRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return s.Begin(ctx, r.GetRequestId(), "checkpoint rm", r, admission.QuickDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		k, err := s.Checkpoint(ctx, r.GetMachine(), r.GetCheckpoint())
		if err != nil {
			return nil, err
		}
		claim := catalog.Claim{Kind: catalog.CheckpointResource, ID: k.ID, Exclusive: true}
		if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claim); err != nil {
			return nil, err
		}
		return nil, s.Catalog.ForgetCheckpoint(ctx, k.ID, w.ID())
	})
}
