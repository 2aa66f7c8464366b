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

// attempt is a shutdown under way. It goes on when its caller is gone, and
// whoever asks meanwhile waits for its outcome.
type attempt struct {
	done chan struct{} // closed when the outcome is there:
	exit *monitorv1.Exit
	err  error
}

// Shutdown asks the guest agent, and then waits for QEMU's own exit.
func (s service) Shutdown(ctx context.Context, req *connect.Request[monitorv1.ShutdownRequest]) (*connect.Response[monitorv1.ShutdownResponse], error) {
	timeout := time.Duration(req.Msg.GetTimeoutMillis()) * time.Millisecond
	if timeout <= 0 {
		return nil, wire.Encode(errdefs.New(errdefs.Invalid, "shut down machine %s: a timeout is needed", s.m.name()))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	defer cancel()
	s.m.mu.Lock()
	a, mine := s.m.attempt, false
	if a == nil {
		a, mine = &attempt{done: make(chan struct{})}, true
		s.m.attempt = a
	}
	s.m.mu.Unlock()
	if mine {
		a.exit, a.err = s.m.shutdown(ctx, timeout)
		s.m.mu.Lock()
		s.m.attempt = nil
		s.m.mu.Unlock()
		close(a.done)
	}
	select {
	case <-a.done:
	case <-ctx.Done():
		return nil, wire.Encode(s.m.overdue(timeout))
	}
	if a.err != nil {
		return nil, wire.Encode(a.err)
	}
	return connect.NewResponse(&monitorv1.ShutdownResponse{Exit: a.exit}), nil
}

func (m *supervisor) overdue(timeout time.Duration) error {
	return errdefs.New(errdefs.Deadline, "its guest did not stop within %s and goes on", timeout)
}

func (m *supervisor) shutdown(ctx context.Context, timeout time.Duration) (*monitorv1.Exit, error) {
	conv, err := m.conversation(ctx)
	runID := m.status().GetRunId()
	if err == nil {
		err = m.ask(ctx, conv, runID, min(timeout/2, maxGrace))
	}
	var st *monitorv1.StatusResponse
	if err == nil {
		st, err = m.awaitExit(ctx, runID)
	}
	if err == nil {
		return st.GetExit(), nil
	}
	// The guest goes on, so what it said is of no worth any more.
	back := m.record(func(r *monitor.Record) { r.SaidClean = r.SaidClean && r.Phase == monitor.Exited })
	if back != nil {
		m.Log.Warn("the guest's word that its file systems are clean is not taken back", "run", runID, "error", back)
	}
	if ctx.Err() != nil {
		err = m.overdue(timeout)
	}
	return nil, err
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
		// The guest waits for this before it powers off; it rarely gets to answer.
		_, _ = conv.Agent().Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
	}
	if err != nil {
		m.Log.Warn("the guest's word that its file systems are clean is missing", "run", runID, "error", err)
	}
	return nil
}
