//go:build linux

package guest

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A command that the guest does not begin ends its stream; one that has begun
// takes as long as it wants.
func TestBeginning(t *testing.T) {
	for _, begins := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			parent, cancel := context.WithCancel(t.Context())
			defer cancel()
			ctx, begun := beginning(parent)
			time.Sleep(startTimeout - time.Second)
			if err := context.Cause(ctx); err != nil {
				t.Fatalf("begins %v: ended early: %v", begins, err)
			}
			if begins {
				begun()
			}
			time.Sleep(time.Hour)
			if ended := errors.Is(context.Cause(ctx), errNotBegun); ended == begins {
				t.Errorf("begins %v: %v", begins, context.Cause(ctx))
			}
		})
	}
}
