//go:build linux

package agent

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent/identity"
	"github.com/holdpoint/holdpoint/internal/agent/system"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// minEntropy is how many bytes Continue needs at least.
const minEntropy = 32

// told is what Configure and Continue both tell the kernel.
type told interface {
	GetHostname() string
	GetMachineId() string
	GetUnixNano() int64
	GetEntropy() []byte
}

// tellKernel gives the kernel fresh entropy first, so that nothing draws from
// what others have, then the time and the name.
func (a *Agent) tellKernel(m told) error {
	if len(m.GetEntropy()) > 0 && a.cfg.Init {
		if err := identity.AddEntropy(m.GetEntropy()); err != nil {
			return err
		}
	}
	if m.GetUnixNano() != 0 {
		if err := a.clock.Set(m.GetUnixNano()); err != nil {
			return err
		}
	}
	if m.GetHostname() != "" && a.cfg.Init {
		return identity.SetHostname(m.GetHostname())
	}
	return nil
}

// writeNames writes the files that name the machine. Where one cannot be, as
// something else is in its place, the machine is handed out all the same: who
// repairs it must get in.
func (a *Agent) writeNames(m told) error {
	misplaced, err := identity.WriteFiles(a.cfg.World, m.GetHostname(), m.GetMachineId())
	if len(misplaced) > 0 {
		a.cfg.Log.Error("no files, so they do not name this machine", "paths", misplaced)
	}
	return err
}

// Continue tells a guest that goes on from a full checkpoint who it is now.
// After an error some of it may have been done; it may be called again.
func (a *Agent) Continue(_ context.Context, req *connect.Request[agentv1.ContinueRequest]) (*connect.Response[agentv1.ContinueResponse], error) {
	closed, err := a.goOn(req.Msg)
	if err != nil {
		return nil, wire.Encode(fmt.Errorf("continue: %w", err))
	}
	return connect.NewResponse(&agentv1.ContinueResponse{ClosedSockets: uint32(closed)}), nil
}

func (a *Agent) goOn(m *agentv1.ContinueRequest) (closedSockets int, err error) {
	if err := identity.Check(m.GetHostname(), m.GetMachineId()); err != nil {
		return 0, err
	}
	if n := len(m.GetEntropy()); n < minEntropy {
		return 0, errdefs.New(errdefs.Invalid, "%d bytes of entropy: give at least %d", n, minEntropy)
	}
	a.continuing.Lock()
	defer a.continuing.Unlock()
	if err := a.ready(); err != nil {
		return 0, err
	}
	news := a.news(m)
	if err := a.tellKernel(news); err != nil {
		return 0, err
	}
	if a.cfg.Init {
		if closedSockets, err = identity.DestroyOutside(); err != nil {
			// They end as their programs send or give up.
			a.cfg.Log.Warn("destroy sockets to the outside", "destroyed", closedSockets, "error", err)
		}
	}
	if err := a.writeNames(news); err != nil {
		return 0, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cfg.System != nil && news.GetMachineId() != "" {
		if err := system.KeepJournal(a.cfg.World, a.configured.GetMachineId(), news.GetMachineId()); err != nil {
			a.cfg.Log.Warn("the journal is found under the old machine id only", "error", err)
		}
	}
	now := proto.CloneOf(a.configured)
	if news.GetHostname() != "" {
		now.Hostname = news.GetHostname()
	}
	if news.GetMachineId() != "" {
		now.MachineId = news.GetMachineId()
	}
	a.configured = now
	return closedSockets, nil
}

// news is what is told without the names that the guest was told before. They
// are left as they are: the machine is the one that it was, and may have taken
// another name since, or have removed the files, which a restore brings back so.
func (a *Agent) news(m *agentv1.ContinueRequest) *agentv1.ContinueRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	news := proto.CloneOf(m)
	if news.GetHostname() == a.configured.GetHostname() {
		news.Hostname = ""
	}
	if news.GetMachineId() == a.configured.GetMachineId() {
		news.MachineId = ""
	}
	return news
}

// StepClock moves the wall clock.
func (a *Agent) StepClock(_ context.Context, req *connect.Request[agentv1.StepClockRequest]) (*connect.Response[agentv1.StepClockResponse], error) {
	if err := a.clock.Step(time.Duration(req.Msg.GetDeltaNano())); err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(&agentv1.StepClockResponse{}), nil
}
