package history

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// NewExpose is the verb `expose`.
func NewExpose(a *app.App) *cobra.Command {
	var o exposeOptions
	cmd := a.Command(app.Verb{
		Use: "expose MACHINE PORT [flags]", Short: "Publish a port of a machine under a host name, or as a port of the host",
		Long: `Publish a TCP port of a machine under a host name, and print the URL. It carries
HTTP/1.1 with WebSockets, and HTTP/2 without TLS for clients that begin with it, as
those of gRPC do. A host name of the machine that leads to another port is moved; one
of another machine is refused. A server has 10 minutes to begin its answer to a
request of HTTP/1.1; "holdpoint logs MACHINE --route HOST" prints what was asked for.

With --tcp publish it for any protocol, as a port of the host's loopback: the one
that --listen names, else the one with the machine's number, if that is free and from
1024 on, else another. The route has its address, 127.0.0.1:PORT, for a host name,
also in "unexpose" and "logs --route". Every program on the host may connect to it.`,
		Example: `  holdpoint expose web 8080 --host app.localhost
  holdpoint expose web 5432 --tcp --listen 15432`,
		MinArgs: 2, MaxArgs: 2, Effect: true, Object: view.RoutesDone{}, Complete: app.First(a.MachineNames),
		Kinds: []errdefs.Kind{
			errdefs.NotFound, errdefs.AlreadyExists, errdefs.Conflict, errdefs.RequestIDConflict,
			errdefs.MachineBusy, errdefs.WrongState, errdefs.Storage, errdefs.Denied,
		},
		Run: func(ctx context.Context, args []string) error { return runExpose(ctx, a, args[0], args[1], o) },
	})
	cmd.Flags().StringVar(&o.host, "host", "", "host name (default MACHINE.localhost)")
	cmd.Flags().BoolVar(&o.tcp, "tcp", false, "publish a port of the host for any protocol instead")
	cmd.Flags().Uint16Var(&o.listen, "listen", 0, "that port, with --tcp (default a free one)")
	return cmd
}

type exposeOptions struct {
	host   string
	tcp    bool
	listen uint16
}

func runExpose(ctx context.Context, a *app.App, machine, port string, o exposeOptions) error {
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || number == 0 {
		return errdefs.New(errdefs.Invalid, "expose %s: port %q is not a number from 1 to 65535", machine, port)
	}
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, c.Routes.Expose, &holdpointv1.ExposeRequest{
			RequestId: a.RequestID(), Machine: machine, Port: uint32(number), Host: o.host, Tcp: o.tcp, Listen: uint32(o.listen),
		})
		if err != nil {
			return err
		}
		return printRoutes(a, op)
	})
}

// NewUnexpose is the verb `unexpose`.
func NewUnexpose(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Example: `  holdpoint unexpose app.localhost
  holdpoint unexpose 127.0.0.1:15432`,
		Use: "unexpose HOST", Short: "Withdraw a published host name, or the address of a TCP route", MinArgs: 1, MaxArgs: 1, Effect: true,
		Object: view.RoutesDone{}, Complete: app.First(a.HostNames),
		Kinds: []errdefs.Kind{errdefs.NotFound, errdefs.RequestIDConflict, errdefs.MachineBusy, errdefs.Storage},
		Run:   func(ctx context.Context, args []string) error { return runUnexpose(ctx, a, args[0]) },
	})
}

func runUnexpose(ctx context.Context, a *app.App, host string) error {
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, c.Routes.Unexpose, &holdpointv1.UnexposeRequest{RequestId: a.RequestID(), Host: host})
		if err != nil {
			return err
		}
		op.GetResult().Routes = nil // withdrawn, so there is none to print
		return printRoutes(a, op)
	})
}

// printRoutes prints the routes an operation has made.
func printRoutes(a *app.App, op *client.Operation) error {
	routes, notes := op.GetResult().GetRoutes(), op.GetResult().GetNotes()
	a.Note(notes)
	o := app.Output{Object: view.RoutesDone{
		Header: view.NewHeader(), Routes: view.List(routes, view.RouteOf), Operation: op.GetId(), Notes: view.Notes(notes),
	}}
	for _, r := range routes {
		o.Terse = append(o.Terse, r.GetUrl())
	}
	o.Human = func(w io.Writer) error {
		for _, r := range routes {
			if _, err := fmt.Fprintf(w, "%s → %s port %d\n", r.GetUrl(), r.GetMachine(), r.GetPort()); err != nil {
				return err
			}
		}
		return nil
	}
	return a.Print(o)
}

// NewRoutes is the verb `routes`.
func NewRoutes(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "routes [MACHINE]", Short: "List published host names and TCP routes", MaxArgs: 1, Object: view.Routes{},
		Kinds: []errdefs.Kind{errdefs.NotFound}, Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error { return runRoutes(ctx, a, app.Optional(args)) },
	})
}

func runRoutes(ctx context.Context, a *app.App, machine string) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Routes.List(ctx, connect.NewRequest(&holdpointv1.ListRoutesRequest{Machine: machine}))
		if err != nil {
			return err
		}
		routes := res.Msg.GetRoutes()
		o := app.Output{Object: view.Routes{Header: view.NewHeader(), Routes: view.List(routes, view.RouteOf)}}
		rows := make([][]string, 0, len(routes))
		for _, r := range routes {
			o.Terse = append(o.Terse, r.GetHost())
			rows = append(rows, []string{r.GetHost(), r.GetMachine(), fmt.Sprint(r.GetPort()), r.GetUrl()})
			if r.GetProblem() != "" {
				a.Say(view.Line(r.GetUrl() + " is not served: " + r.GetProblem()))
			}
		}
		o.Human = func(w io.Writer) error { return view.Table(w, []string{"HOST", "MACHINE", "PORT", "URL"}, rows) }
		return a.Print(o)
	})
}
