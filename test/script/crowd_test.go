package script_test

import (
	"context"
	"strings"
	"testing"
	"time"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
)

// mostCommands is how many commands of a machine clients may be at.
const mostCommands = 256

// TestCrowd is at as many commands of a machine as that allows: one more is refused
// until one has ended, other machines are not concerned, and what the daemon itself
// asks of the guest gets through.
func TestCrowd(t *testing.T) {
	s := newSession(t)
	s.Must(t, "run", "web", "--image", "debian")
	s.Must(t, "run", "other", "--image", "debian")
	c, err := client.Dial(t.Context(), client.Options{Home: s.Home})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ends := make([]func(), mostCommands)
	for i := range ends {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream := c.Guest.Exec(ctx)
		ends[i] = func() {
			cancel()
			_ = stream.CloseRequest()
			_ = stream.CloseResponse()
		}
		err := stream.Send(&holdpointv1.GuestExecRequest{Machine: "web", Message: &agentv1.ExecRequest{
			Message: &agentv1.ExecRequest_Start{Start: &agentv1.ExecStart{Argv: []string{"sleep", "600"}}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		if m, err := stream.Receive(); err != nil || m.GetMessage().GetStarted() == nil {
			t.Fatalf("command %d: %v, %v", i, m, err)
		}
	}
	r, err := s.Run("exec", "web", "--", "true")
	if err != nil || r.Code != 125 || r.Stderr != "holdpoint: exec true: machine web is at 256 commands, the most at once; try again when one has ended, or start long ones with --detach\n" {
		t.Errorf("one more: %d, %q, %v", r.Code, r.Stderr, err)
	}
	if r, err := s.Run("exec", "web", "--json", "--", "true"); err != nil || !strings.Contains(r.Stdout+r.Stderr, `"MACHINE_BUSY"`) {
		t.Errorf("one more: %q, %q, %v", r.Stdout, r.Stderr, err)
	}
	s.Must(t, "exec", "other", "--", "true")
	s.Must(t, "checkpoint", "create", "web")
	s.Must(t, "cp", "web:.", t.TempDir())
	ends[0]()
	for began := time.Now(); ; {
		if r, err := s.Run("exec", "web", "--", "true"); err == nil && r.Code == 0 {
			break
		} else if time.Since(began) > time.Minute {
			t.Fatalf("one has ended: %d, %q, %v", r.Code, r.Stderr, err)
		}
	}
	for _, end := range ends {
		end()
	}
	s.Must(t, "rm", "web", "--force")
	s.Must(t, "rm", "other", "--force")
}
