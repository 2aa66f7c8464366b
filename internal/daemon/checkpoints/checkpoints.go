//go:build linux

// Package checkpoints serves CheckpointService: it admits what is asked of
// checkpoints and shows them. How one is taken is said elsewhere.
package checkpoints

import (
	"cmp"
	"context"
	"fmt"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/daemon/proof"
	"github.com/holdpoint/holdpoint/internal/daemon/standby"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// Config is what a Service works with.
type Config struct {
	*admission.Desk
	Pools *standby.Pools
}

// Service serves CheckpointService.
type Service struct{ Config }

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
		view, err := s.View.Checkpoint(ctx, k, m)
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
		s.StandAside(k.MachineID)
		// A pool that is being filled holds the checkpoint: end that first.
		if err := s.Pools.End(ctx, k.ID); err != nil {
			return nil, err
		}
		claim := catalog.Claim{Kind: catalog.CheckpointResource, ID: k.ID, Exclusive: true}
		if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claim); err != nil {
			return nil, err
		}
		was, err := s.View.CheckpointNow(ctx, k)
		if err != nil {
			return nil, err
		}
		if err := s.Catalog.ForgetCheckpoint(ctx, k.ID, w.ID()); err != nil {
			return nil, err
		}
		return &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{Checkpoint: was}}, nil
	})
}

// Verify proves that a checkpoint can be restored.
func (s *Service) Verify(ctx context.Context, req *connect.Request[holdpointv1.VerifyCheckpointRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return s.Begin(ctx, r.GetRequestId(), "checkpoint verify", r, admission.StoryDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		k, err := s.claim(ctx, w, r.GetMachine(), r.GetCheckpoint())
		if err != nil {
			return nil, err
		}
		s.StandAside(k.MachineID)
		w.Say("reading its layers")
		proven, err := s.Prover.Prove(ctx, k, w.Progress)
		if err != nil {
			return nil, fmt.Errorf("verify checkpoint %s: %w", cmp.Or(k.Name, k.ID), err)
		}
		out := &holdpointv1.VerifyResult{Layers: uint32(proven.Layers), Bytes: proven.Bytes, Restored: proven.Restored}
		if k, err = s.Catalog.GetCheckpoint(ctx, k.ID); err != nil {
			return nil, err
		}
		out.Checkpoint, err = s.View.CheckpointNow(ctx, k)
		return &holdpointv1.OperationResult{Verify: out}, err
	})
}

// SetPool keeps a number of standbys of a full checkpoint ready.
func (s *Service) SetPool(ctx context.Context, req *connect.Request[holdpointv1.SetPoolRequest]) (*connect.Response[holdpointv1.Operation], error) {
	r := req.Msg
	return s.Begin(ctx, r.GetRequestId(), "checkpoint pool", r, admission.StoryDeadline, func(ctx context.Context, w *operation.Work) (*holdpointv1.OperationResult, error) {
		k, err := s.claim(ctx, w, r.GetMachine(), r.GetCheckpoint())
		if err != nil {
			return nil, err
		}
		if err := standby.Check(r.GetCheckpoint(), k, int(r.GetCount())); err != nil {
			return nil, err
		}
		if r.GetCount() > 0 {
			if err := s.Prover.Trust(ctx, k, proof.LayersOf(k)...); err != nil {
				return nil, fmt.Errorf("checkpoint pool: %w", err)
			}
		}
		if err := s.Pools.Set(ctx, w, k, int(r.GetCount())); err != nil {
			return nil, err
		}
		shown, err := s.View.CheckpointNow(ctx, k)
		return &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{Checkpoint: shown}}, err
	})
}

// claim resolves a checkpoint and leases it to the operation.
func (s *Service) claim(ctx context.Context, w *operation.Work, machineRef, ref string) (checkpoint.Checkpoint, error) {
	k, err := s.Checkpoint(ctx, machineRef, ref)
	if err != nil {
		return k, err
	}
	if m, err := s.Catalog.GetMachine(ctx, k.MachineID); err == nil {
		w.Machine(m.ID, m.Name)
	}
	claim := catalog.Claim{Kind: catalog.CheckpointResource, ID: k.ID}
	if err := s.Catalog.Acquire(ctx, w.ID(), admission.LeaseTime, claim); err != nil {
		return k, err
	}
	return s.Catalog.GetCheckpoint(ctx, k.ID)
}
