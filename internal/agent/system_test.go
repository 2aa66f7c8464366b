//go:build linux

package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent"
	"github.com/holdpoint/holdpoint/internal/agent/command"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// otherInit is an init beside the agent that does as it is told.
type otherInit struct {
	world    string
	onBoot   *command.Spec
	hostname string // the file's content when it was started
	ready    chan struct{}
	stop     error
	released bool
}

func (o *otherInit) Start(onBoot *command.Spec) error {
	o.onBoot = onBoot
	b, err := os.ReadFile(filepath.Join(o.world, "etc/hostname"))
	o.hostname = string(b)
	return err
}

func (o *otherInit) AwaitReady(ctx context.Context) error {
	select {
	case <-o.ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (o *otherInit) Stop(context.Context) error { return o.stop }
func (o *otherInit) Release()                   { o.released = true }

// TestBesideAnotherInit: it gets the on-boot command when the guest knows its
// name, and Configure answers when it takes orders; meanwhile the agent answers.
func TestBesideAnotherInit(t *testing.T) {
	o := &otherInit{ready: make(chan struct{})}
	m := serve(t, func(cfg *agent.Config) { o.world, cfg.System = cfg.World, o })
	ping := func() {
		t.Helper()
		pong, err := m.Ping(testCtx(t), connect.NewRequest(&agentv1.PingRequest{}))
		if err != nil || pong.Msg.GetBuild() != "test" {
			t.Errorf("ping: %v, %v", pong, err)
		}
	}
	ping() // there is one conversation, which all use from then on
	configured := make(chan error, 1)
	told := &agentv1.ConfigureRequest{Hostname: "web", OnBoot: "touch here"}
	go func() {
		_, err := m.Configure(testCtx(t), connect.NewRequest(told))
		configured <- err
	}()
	ping()
	close(o.ready)
	if err := <-configured; err != nil {
		t.Fatal(err)
	}
	if o.onBoot == nil || o.onBoot.Argv[2] != "touch here" || o.hostname != "web\n" {
		t.Errorf("the init was started with %v, in a guest called %q", o.onBoot, o.hostname)
	}
	o.stop = errdefs.New(errdefs.Deadline, "not yet")
	_, err := m.Shutdown(testCtx(t), connect.NewRequest(&agentv1.ShutdownRequest{}))
	if !errdefs.Is(wire.Decode(err), errdefs.Deadline) || !o.released {
		t.Errorf("shut down: %v, released %t", err, o.released)
	}
}

func TestRefusal(t *testing.T) {
	m := serve(t, func(cfg *agent.Config) { cfg.Refusal = errdefs.New(errdefs.Unsupported, "no init") })
	_, err := m.Configure(testCtx(t), connect.NewRequest(&agentv1.ConfigureRequest{}))
	if !errdefs.Is(wire.Decode(err), errdefs.Unsupported) {
		t.Errorf("got %v", err)
	}
}
