package machinetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// guestInterceptor makes the agent's calls have the effects they have in a
// guest: what a command wrote is on the disk before its end is reported, the
// guest has a clock of its own, what the agent was told is in memory; and tests
// can make a shutdown or a continuation go wrong.
type guestInterceptor struct {
	spec     fakeSpec
	services *guestServices

	mu sync.Mutex
	// configured is nil before Configure.
	configured *agentv1.ConfigureRequest
}

func (i *guestInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if msg, ok := req.Any().(*agentv1.StepClockRequest); ok {
			_, err := i.services.ask(request{Op: "step-clock", Nano: msg.GetDeltaNano()})
			return connect.NewResponse(&agentv1.StepClockResponse{}), err
		}
		if err := i.before(req.Any()); err != nil {
			return nil, err
		}
		resp, err := next(ctx, req)
		if err != nil {
			return nil, err
		}
		return resp, i.after(req.Any(), resp.Any())
	}
}

// before is what precedes a call.
func (i *guestInterceptor) before(req any) error {
	switch msg := req.(type) {
	case *agentv1.ConfigureRequest:
		if text, ok := readFault(i.spec, "configure-fails"); ok {
			return wire.Encode(errdefs.New(errdefs.Unsupported, "%s", text))
		}
		var paths []string
		for _, path := range msg.GetTmpfs() {
			paths = append(paths, strings.TrimPrefix(path, "/"))
		}
		_, err := i.services.ask(request{Op: "tmpfs", Paths: paths})
		return err
	case *agentv1.ContinueRequest:
		fmt.Println("fake guest is told that it is " + msg.GetHostname())
		// A run that waited has no name of its own.
		spec := i.spec
		spec.Run.MachineName = msg.GetHostname()
		if text, ok := readFault(spec, "continue-fails"); ok {
			return connect.NewError(connect.CodeInternal, errors.New(text))
		}
		awaitGone(faultPath(spec, "continue-waits"))
	case *agentv1.ShutdownRequest:
		fmt.Println("fake guest is asked to shut down")
		if text, ok := readFault(i.spec, "shutdown-fails"); ok {
			return connect.NewError(connect.CodeInternal, errors.New(text))
		}
		awaitGone(faultPath(i.spec, "shutdown-waits"))
	}
	return nil
}

// after is what a call has done besides.
func (i *guestInterceptor) after(req, resp any) error {
	switch msg := req.(type) {
	case *agentv1.PingRequest:
		a, err := i.services.ask(request{Op: "clock"})
		if err != nil {
			return err
		}
		if pong, ok := resp.(*agentv1.PingResponse); ok {
			pong.UnixNano, pong.BootId = a.Nano, i.spec.Kept.BootID
		}
	case *agentv1.ConfigureRequest:
		return i.told(msg.GetUnixNano(), &agentv1.ConfigureRequest{
			Hostname: msg.GetHostname(), MachineId: msg.GetMachineId(), OnBoot: msg.GetOnBoot(), Tmpfs: msg.GetTmpfs(), OnBootCommand: msg.GetOnBootCommand(),
		})
	case *agentv1.ContinueRequest:
		i.mu.Lock()
		now := proto.CloneOf(i.configured)
		i.mu.Unlock()
		now.Hostname = cmp.Or(msg.GetHostname(), now.GetHostname())
		now.MachineId = cmp.Or(msg.GetMachineId(), now.GetMachineId())
		return i.told(msg.GetUnixNano(), now)
	}
	return nil
}

// told notes who the guest is, and what time it is; 0 leaves that.
func (i *guestInterceptor) told(unixNano int64, who *agentv1.ConfigureRequest) error {
	i.mu.Lock()
	i.configured = who
	i.mu.Unlock()
	if unixNano != 0 {
		if _, err := i.services.ask(request{Op: "set-clock", Nano: unixNano}); err != nil {
			return err
		}
	}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(who)
	if err != nil {
		return err
	}
	_, err = i.services.ask(request{Op: "configured", Data: data})
	return err
}

func (i *guestInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (i *guestInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return next(ctx, syncingConn{conn, i.services})
	}
}

// syncingConn syncs the disk before it says that something has ended.
type syncingConn struct {
	connect.StreamingHandlerConn
	services *guestServices
}

func (c syncingConn) Send(msg any) error {
	ends := false
	switch m := msg.(type) {
	case *agentv1.ExecResponse:
		ends = m.GetExit() != nil
	case *agentv1.UploadResponse:
		ends = true
	}
	if ends {
		if _, err := c.services.ask(request{Op: "sync"}); err != nil {
			return fmt.Errorf("sync fake disk: %w", err)
		}
	}
	return c.StreamingHandlerConn.Send(msg)
}

// serveAgent serves the real agent over the port until the machine ends it.
func serveAgent(ctx context.Context, spec fakeSpec, port net.Conn, services *guestServices) error {
	params, err := agent.ParseCmdline(spec.Kept.Cmdline)
	if err != nil {
		return err
	}
	var continued *agentv1.ConfigureRequest
	if len(spec.Kept.Configured) > 0 {
		continued = &agentv1.ConfigureRequest{}
		if err := proto.Unmarshal(spec.Kept.Configured, continued); err != nil {
			return err
		}
	}
	a, err := agent.New(agent.Config{
		Continued: continued,
		Build:     "fake", World: rootDir(spec.Run), Console: os.Stdout, Path: os.Getenv("PATH"),
		PowerOff: func() {
			fmt.Println("fake guest powers off")
			// The machine ends with this; there is no answer.
			_, _ = services.ask(request{Op: "end", Reason: machine.GuestShutdown})
		},
		Log: slog.New(slog.NewTextHandler(os.Stdout, nil)),
	})
	if err != nil {
		return err
	}
	return a.Serve(ctx, link.NewGuest(port, params.Magic), connect.WithInterceptors(&guestInterceptor{spec: spec, services: services, configured: continued}))
}
