//go:build linux

package fleet

import (
	"context"
	"testing"

	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// TestAwaitTellsOneCause: who cancels the wait is not told what the guest does
// meanwhile, who runs out of time is.
func TestAwaitTellsOneCause(t *testing.T) {
	run := &Run{ID: "r1", status: &monitorv1.StatusResponse{Trouble: "it is slow"}, changed: make(chan struct{})}
	for _, tt := range []struct {
		cause error
		want  string
	}{
		{errdefs.New(errdefs.Interrupted, "canceled"), "wait for the guest to answer: canceled"},
		{errdefs.New(errdefs.Deadline, "not done within 1s"), "wait for the guest to answer: not done within 1s (it is slow)"},
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(tt.cause)
		if err := run.AwaitReady(ctx); err == nil || err.Error() != tt.want {
			t.Errorf("%v, want %q", err, tt.want)
		}
	}
}
