package capturetest

import (
	"context"
	"time"

	"github.com/holdpoint/holdpoint/internal/capture"
	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
)

// FrozenRequest asks for a frozen checkpoint of the machine as it is now.
func (w *World) FrozenRequest(id, name string) capture.FrozenRequest {
	w.tb.Helper()
	return capture.FrozenRequest{
		Machine: w.Now(), Source: w.Source, Enter: w.Enter, Order: capture.FreezeOrder{Limit: time.Second},
		Checkpoint: checkpoint.Checkpoint{ID: id, Name: name},
	}
}

// SwitchAtRest gives the run a new top; "freeze" in Fails keeps it from that, and
// "thaw" says afterwards that it was not at rest.
func (s *Source) SwitchAtRest(_ context.Context, top catalog.Layer, _ capture.FreezeOrder) (capture.Rest, error) {
	if err := s.do("freeze"); err != nil {
		return capture.Rest{}, err
	}
	s.disk = append(s.diskNow(), top.ID)
	if s.OnFreeze != nil {
		s.OnFreeze()
	}
	return capture.Rest{Frozen: time.Millisecond, HookFailure: s.HookFailure}, s.do("thaw")
}
