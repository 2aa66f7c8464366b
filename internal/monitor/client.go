//go:build linux

package monitor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/api/monitor/v1/monitorv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// ErrGone says that the monitor cannot be reached: it never was there, or it
// died. Whether the run has ended with it only its record can tell, and a
// successor (Ensure) goes on with it. A call that got ErrGone may have had its
// effect.
var ErrGone = errors.New("the machine's monitor is gone")

// Client talks to one monitor. Its life: Connect, Start or Ensure makes it;
// its methods may be called at the same time; Close ends its connections, not
// the monitor. After the monitor's death every call gives ErrGone at once.
type Client struct {
	dir string
	// machine is what people call it.
	machine string
	// Two connections, so that a crowd of transfers never holds up Kill.
	control, data *http.Transport
	conns         *connSet
	monitor       monitorv1connect.MonitorServiceClient
	agent         agentv1connect.AgentServiceClient
}

// Connect connects to the living monitor of the run's folder dir. ErrGone
// means that there is none; a monitor of a newer protocol is INCOMPATIBLE, one
// that does not answer within 10 s is DEADLINE.
func Connect(ctx context.Context, dir string) (*Client, error) {
	cfg, err := ReadConfig(dir)
	if err != nil {
		return nil, err
	}
	socket := cfg.Socket()
	conns := &connSet{open: map[net.Conn]struct{}{}}
	c := &Client{dir: dir, machine: nameOf(dir), conns: conns, control: dialer(socket, conns), data: dialer(socket, conns)}
	c.monitor = monitorv1connect.NewMonitorServiceClient(&http.Client{Transport: c.control}, "http://monitor", relay.Plain())
	c.agent = agentv1connect.NewAgentServiceClient(&http.Client{Transport: wire.FrameTransport(c.data)}, "http://monitor", relay.Plain(), relay.PlainWords(c.machine))
	limited, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	st, err := c.Status(limited)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		err = unanswered(dir)
	}
	if err == nil && st.GetProtocol() > ProtocolVersion {
		err = errdefs.New(errdefs.Incompatible, "machine %s: its monitor (build %s) speaks protocol %d, this build (%d) is older; use the newer holdpoint, or stop and start the machine with that one",
			c.machine, st.GetBuild(), st.GetProtocol(), ProtocolVersion)
	}
	if err == nil && !cfg.Wait && st.GetMachineId() != cfg.Run.MachineID {
		err = errdefs.New(errdefs.Conflict, "machine %s: the monitor on %q is that of machine %s", c.machine, socket, st.GetMachineId())
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func dialer(socket string, conns *connSet) *http.Transport {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	return &http.Transport{
		Protocols:          &protocols,
		DisableCompression: true,
		HTTP2:              relay.ClientHTTP2(),
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			conn, err := d.DialContext(ctx, "unix", socket)
			if err != nil {
				return nil, err
			}
			return conns.add(conn)
		},
	}
}

// Close ends the client's connections. Streams of the agent that still run are
// cut off.
func (c *Client) Close() {
	c.conns.closeAll()
	c.control.CloseIdleConnections()
	c.data.CloseIdleConnections()
}

// connSet closes connections that are in use, which a Transport does not.
type connSet struct {
	mu     sync.Mutex
	closed bool
	open   map[net.Conn]struct{}
}

func (s *connSet) add(conn net.Conn) (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.Join(net.ErrClosed, conn.Close())
	}
	s.open[conn] = struct{}{}
	return &setConn{Conn: conn, set: s}, nil
}

func (s *connSet) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for conn := range s.open {
		_ = conn.Close() // cut off on purpose
	}
	clear(s.open)
}

// setConn leaves its set when it is closed.
type setConn struct {
	net.Conn
	set *connSet
}

func (c *setConn) Close() error {
	c.set.mu.Lock()
	delete(c.set.open, c.Conn)
	c.set.mu.Unlock()
	return c.Conn.Close()
}

// Agent is the guest agent, through the monitor. While the guest is not there
// its calls fail with the code unavailable and a message that says why.
func (c *Client) Agent() agentv1connect.AgentServiceClient { return c.agent }

// Dir is the run's folder.
func (c *Client) Dir() string { return c.dir }

// Status is what the monitor knows now.
func (c *Client) Status(ctx context.Context) (*monitorv1.StatusResponse, error) {
	resp, err := c.monitor.Status(ctx, connect.NewRequest(&monitorv1.StatusRequest{}))
	if err != nil {
		return nil, c.decode(ctx, err)
	}
	return resp.Msg, nil
}

// Watch calls f with the status now and after each change, until f gives an
// error, which is returned, or the run has ended: nil, after a status with an
// exit. ErrGone means that the monitor died, and comes at once. If it died
// after the run's end, that end is told as usual.
func (c *Client) Watch(ctx context.Context, f func(*monitorv1.StatusResponse) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.monitor.Watch(ctx, connect.NewRequest(&monitorv1.StatusRequest{}))
	if err == nil {
		defer stream.Close()
		for stream.Receive() {
			st := stream.Msg()
			if err := f(st); err != nil || st.GetExit() != nil {
				return err
			}
		}
		err = stream.Err()
	}
	if err == nil {
		err = io.ErrUnexpectedEOF // an exit was promised
	}
	err = c.decode(ctx, err)
	if rec, failed := ReadRecord(c.dir); failed == nil && rec.Phase == Exited && errors.Is(err, ErrGone) {
		return f(rec.status())
	}
	return err
}

// status is what the record alone can tell.
func (r Record) status() *monitorv1.StatusResponse {
	return &monitorv1.StatusResponse{
		Protocol: ProtocolVersion, MachineId: r.MachineID, RunId: r.RunID,
		Phase: r.Phase.Proto(), Exit: r.Exit.Proto(), ReadyUnixNano: r.ReadyUnixNano, Disk: LayerIDs(r.Disk),
	}
}

// LayerIDs are the ids of a chain.
func LayerIDs(disk []machine.Layer) []string {
	ids := make([]string, len(disk))
	for i, layer := range disk {
		ids[i] = layer.ID
	}
	return ids
}

// errEnough ends a Watch that has seen what it was for.
var errEnough = errors.New("enough seen")

// AwaitReady waits until the guest agent has answered and accepted its
// configuration. A run that ends before is WRONG_STATE.
func (c *Client) AwaitReady(ctx context.Context) (*monitorv1.StatusResponse, error) {
	var last *monitorv1.StatusResponse
	err := c.Watch(ctx, func(st *monitorv1.StatusResponse) error {
		last = st
		if st.GetReady() {
			return errEnough
		}
		return nil
	})
	switch {
	case errors.Is(err, errEnough):
		return last, nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("await guest of machine %s: %w%s", c.machine, ctx.Err(), colon(last.GetTrouble()))
	case err != nil:
		return nil, err
	}
	return nil, errdefs.New(errdefs.WrongState, "await guest of machine %s: its run has ended (%s)%s; look at its console with holdpoint logs",
		c.machine, last.GetExit().GetReason(), colon(last.GetExit().GetMessage()))
}

func colon(text string) string {
	if text == "" {
		return ""
	}
	return ": " + text
}

// AwaitExit waits for the end of the run and gives the last status.
func (c *Client) AwaitExit(ctx context.Context) (*monitorv1.StatusResponse, error) {
	var last *monitorv1.StatusResponse
	err := c.Watch(ctx, func(st *monitorv1.StatusResponse) error {
		last = st
		return nil
	})
	return last, err
}

// Pause stops the vCPUs on a user's word.
func (c *Client) Pause(ctx context.Context) error {
	_, err := c.monitor.Pause(ctx, connect.NewRequest(&monitorv1.PauseRequest{}))
	return c.decode(ctx, err)
}

// Resume lets the vCPUs of a paused machine go.
func (c *Client) Resume(ctx context.Context) error {
	_, err := c.monitor.Resume(ctx, connect.NewRequest(&monitorv1.ResumeRequest{}))
	return c.decode(ctx, err)
}

// SwitchDisk makes the empty overlay top, which exists, the writable top of the
// disk of a paused run. It may be repeated after ErrGone.
func (c *Client) SwitchDisk(ctx context.Context, top machine.Layer) error {
	_, err := c.SwitchAtRest(ctx, top, nil)
	return err
}

// SwitchAtRest does so of a run whose guest freezes its file systems meanwhile.
// It is not repeated; on error Status.Disk says which is the top.
func (c *Client) SwitchAtRest(ctx context.Context, top machine.Layer, freeze *agentv1.FreezeStart) (*monitorv1.SwitchDiskResponse, error) {
	resp, err := c.monitor.SwitchDisk(ctx, connect.NewRequest(&monitorv1.SwitchDiskRequest{LayerId: top.ID, Path: top.Path, Freeze: freeze}))
	if err != nil {
		return nil, c.decode(ctx, err)
	}
	return resp.Msg, nil
}

// ReplaceLayers puts the qcow2 layer merged, which exists, in the place of the
// sealed layers from the first to the last one named. It may be repeated after
// ErrGone.
func (c *Client) ReplaceLayers(ctx context.Context, firstID, lastID string, merged machine.Layer) error {
	req := &monitorv1.ReplaceLayersRequest{FirstId: firstID, LastId: lastID, LayerId: merged.ID, Path: merged.Path}
	_, err := c.monitor.ReplaceLayers(ctx, connect.NewRequest(req))
	return c.decode(ctx, err)
}

// Shutdown asks the guest to stop and waits up to timeout for the end of the
// run. DEADLINE means that the guest did not, and goes on.
func (c *Client) Shutdown(ctx context.Context, timeout time.Duration) (*monitorv1.Exit, error) {
	resp, err := c.monitor.Shutdown(ctx, connect.NewRequest(&monitorv1.ShutdownRequest{TimeoutMillis: timeout.Milliseconds()}))
	if err != nil {
		return c.exit(ctx, err)
	}
	return resp.Msg.GetExit(), nil
}

// Kill ends the run as a power cut would; its end is proven when Kill returns.
func (c *Client) Kill(ctx context.Context) (*monitorv1.Exit, error) {
	resp, err := c.monitor.Kill(ctx, connect.NewRequest(&monitorv1.KillRequest{}))
	if err != nil {
		return c.exit(ctx, err)
	}
	return resp.Msg.GetExit(), nil
}

// exit gives the recorded end in place of an error that only says that the
// monitor is gone, as it is after the run's end.
func (c *Client) exit(ctx context.Context, err error) (*monitorv1.Exit, error) {
	err = c.decode(ctx, err)
	if errors.Is(err, ErrGone) {
		if rec, recErr := ReadRecord(c.dir); recErr == nil && rec.Phase == Exited {
			return rec.Exit.Proto(), nil
		}
	}
	return nil, err
}

// decode tells what the monitor said from what the connection to it said.
func (c *Client) decode(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case connect.IsWireError(err):
		return wire.Decode(err)
	}
	return fmt.Errorf("machine %s: %w (%s)", c.machine, ErrGone, err)
}
