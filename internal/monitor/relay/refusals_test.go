//go:build linux

package relay_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// refusing is a guest that refuses whatever it is told.
type refusing struct {
	agentv1connect.UnimplementedAgentServiceHandler
}

func (refusing) Configure(context.Context, *connect.Request[agentv1.ConfigureRequest]) (*connect.Response[agentv1.ConfigureResponse], error) {
	return nil, wire.Encode(errdefs.New(errdefs.Unsupported, "not today"))
}

// TestRefusals: only what the guest says again and again is final, and it keeps
// its kind.
func TestRefusals(t *testing.T) {
	_, handler := agentv1connect.NewAgentServiceHandler(refusing{})
	server := httptest.NewServer(handler)
	defer server.Close()
	_, err := agentv1connect.NewAgentServiceClient(server.Client(), server.URL).Configure(t.Context(), connect.NewRequest(&agentv1.ConfigureRequest{}))
	refused := fmt.Errorf("configure guest: %w", err)
	var r relay.Refusals
	for range 5 {
		r.Count(refused, false)
	}
	if r.Why() != "" || r.Kind() != "" {
		t.Errorf("final too early: %s", r.Why())
	}
	r.Count(errors.New("cut off"), false)
	for range 6 {
		r.Count(refused, false)
	}
	if r.Why() != "not today" || r.Kind() != errdefs.Unsupported {
		t.Errorf("%s: %s", r.Kind(), r.Why())
	}
	r.Count(refused, true)
	if want := "not today; restore or fork its checkpoint with --as-is to do without its proof of identity, clock and entropy"; r.Why() != want || r.Kind() != errdefs.Unsupported {
		t.Errorf("%s: %s", r.Kind(), r.Why())
	}
	r.Count(nil, false)
	if r.Why() != "" {
		t.Errorf("it still refuses: %s", r.Why())
	}
}
