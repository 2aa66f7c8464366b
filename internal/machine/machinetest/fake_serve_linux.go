package machinetest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// guestInterceptor makes the agent's calls have the effects they have in a
// guest: what a command wrote is on the disk before its end is reported, and
// tests can make a shutdown go wrong.
type guestInterceptor struct {
	spec     fakeSpec
	services *guestServices
}

func (i guestInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		switch msg := req.Any().(type) {
		case *agentv1.ConfigureRequest:
			var memory []string
			for _, path := range msg.GetTmpfs() {
				memory = append(memory, strings.TrimPrefix(path, "/"))
			}
			if err := i.services.ask(request{Op: "memory", Paths: memory}); err != nil {
				return nil, err
			}
		case *agentv1.ShutdownRequest:
			fmt.Println("fake guest is asked to shut down")
			if text, ok := readFault(i.spec, "shutdown-fails"); ok {
				return nil, connect.NewError(connect.CodeInternal, errors.New(text))
			}
			awaitGone(faultPath(i.spec, "shutdown-waits"))
		}
		return next(ctx, req)
	}
}

func (i guestInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (i guestInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
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
		if err := c.services.ask(request{Op: "sync"}); err != nil {
			return fmt.Errorf("sync fake disk: %w", err)
		}
	}
	return c.StreamingHandlerConn.Send(msg)
}

// serveAgent serves the real agent over the port until the machine ends it.
func serveAgent(ctx context.Context, spec fakeSpec, port net.Conn, services *guestServices) error {
	params, err := agent.ParseCmdline(spec.Run.Cmdline)
	if err != nil {
		return err
	}
	a, err := agent.New(agent.Config{
		Build: "fake", World: rootDir(spec.Run), Console: os.Stdout, Path: os.Getenv("PATH"),
		PowerOff: func() {
			fmt.Println("fake guest powers off")
			// The machine ends with this; there is no answer.
			_ = services.ask(request{Op: "end", Reason: machine.GuestShutdown})
		},
		Log: slog.New(slog.NewTextHandler(os.Stdout, nil)),
	})
	if err != nil {
		return err
	}
	return a.Serve(ctx, link.NewGuest(port, params.Magic), connect.WithInterceptors(guestInterceptor{spec, services}))
}
