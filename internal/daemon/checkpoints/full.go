//go:build linux

package checkpoints

import (
	"context"
	"fmt"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/keeper"
	"github.com/holdpoint/holdpoint/internal/daemon/operation"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// createFull takes a full checkpoint. The machine goes on meanwhile, and so do
// its doors: the lease on it keeps away what would end or replace its run.
func (s *Service) createFull(ctx context.Context, w *operation.Work, r *holdpointv1.CreateCheckpointRequest) (*holdpointv1.OperationResult, error) {
	m, err := s.Claim(ctx, w, r.GetMachine())
	if err != nil {
		return nil, err
	}
	run := s.Keeper.Run(m.ID)
	state := keeper.State(m, run)
	if err := machine.Allow("checkpoint create", m.Name, state, machine.Running, machine.Paused); err != nil {
		return nil, err
	}
	if err := s.Catalog.CheckpointNameFree(ctx, m, r.GetName()); err != nil {
		return nil, err
	}
	if err := s.Prover.TrustDisk(ctx, m); err != nil {
		return nil, fmt.Errorf("checkpoint create: nothing could go on from it: %w", err)
	}
	routes, err := s.Keeper.RoutesNow(ctx, m, run)
	if err != nil {
		return nil, err
	}
	result, err := s.Capturer.Full(ctx, capture.FullRequest{
		Operation: w.ID(), Machine: m,
		Checkpoint: checkpoint.Checkpoint{ID: durable.NewID(), Name: r.GetName(), Message: r.GetMessage(), Routes: routes},
		Source:     s.Keeper.Source(m.ID, run, stopPatience, w.Note), Enter: w.Enter, Note: w.Note,
	})
	if err != nil {
		return nil, err
	}
	if err := s.Capturer.Settle(ctx, result.Checkpoint); err != nil {
		s.Log.Warn("measure sealed layers", "checkpoint", result.Checkpoint.ID, "error", err)
	}
	view, err := s.View.CheckpointNow(ctx, result.Checkpoint)
	if err != nil {
		return nil, err
	}
	shown := admission.FullResult(result)
	shown.Checkpoint = view
	return &holdpointv1.OperationResult{Checkpoint: shown}, nil
}
