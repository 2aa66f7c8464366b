//go:build linux

package process

import (
	"context"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// maxGrace is the most that the guest's processes get between SIGTERM and
// SIGKILL, however much time the caller has.
const maxGrace = 10 * time.Second

// Shutdown asks the guest agent, and then waits for QEMU's own exit.
func (s service) Shutdown(ctx context.Context, req *connect.Request[monitorv1.ShutdownRequest]) (*connect.Response[monitorv1.ShutdownResponse], error) {
	timeout := time.Duration(req.Msg.GetTimeoutMillis()) * time.Millisecond
	if timeout <= 0 {
		return nil, wire.Encode(errdefs.New(errdefs.Invalid, "shut down machine %s: a timeout is needed", s.m.cfg.Run.MachineID))
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	exit, err := s.m.shutdown(ctx, timeout)
	if ctx.Err() == context.DeadlineExceeded && err != nil {
		err = errdefs.New(errdefs.Deadline, "shut down machine %s: its guest did not stop within %s and goes on; try longer or stop it by force", s.m.cfg.Run.MachineID, timeout)
	}
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(&monitorv1.ShutdownResponse{Exit: exit}), nil
}

func (m *supervisor) shutdown(ctx context.Context, timeout time.Duration) (*monitorv1.Exit, error) {
	m.mu.Lock()
	busy, rec := m.shutting, m.rec
	m.shutting = true
	m.mu.Unlock()
	if busy {
		return nil, errdefs.New(errdefs.MachineBusy, "shut down machine %s: another shutdown is under way; wait for it", rec.MachineID)
	}
	defer func() {
		m.mu.Lock()
		m.shutting = false
		m.mu.Unlock()
	}()
	conv, err := m.conversation(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.ask(ctx, conv, rec.RunID, min(timeout/2, maxGrace)); err != nil {
		return nil, err
	}
	st, err := m.awaitExit(ctx, rec.RunID)
	return st.GetExit(), err
}

// ask tells the guest agent to shut down and records its word that the file
// systems are clean. An error means that the guest goes on. An answer that is
// lost is none: the guest may be off already, but not provably clean.
func (m *supervisor) ask(ctx context.Context, conv *relay.Conversation, runID string, grace time.Duration) error {
	asking := make(chan struct{})
	m.mu.Lock()
	m.asking = asking
	m.mu.Unlock()
	defer close(asking)
	_, err := conv.Agent().Shutdown(ctx, connect.NewRequest(&agentv1.ShutdownRequest{GraceMillis: grace.Milliseconds()}))
	if err != nil && connect.IsWireError(err) {
		return wire.Decode(err)
	}
	if err == nil {
		err = m.record(func(r *monitor.Record) { r.SaidClean = r.RunID == runID })
	}
	if err != nil {
		m.Log.Warn("the guest's word that its file systems are clean is missing", "run", runID, "error", err)
	}
	return nil
}
