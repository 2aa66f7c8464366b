package inside

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

type logsOptions struct {
	follow  bool
	network bool
	route   string
	tail    uint32
}

// NewLogs is the verb `logs`.
func NewLogs(a *app.App) *cobra.Command {
	var o logsOptions
	var cmd *cobra.Command
	cmd = a.Command(app.Verb{
		Use: "logs MACHINE [flags]", Short: "Print a machine's console, what came through a route, or what its network refused",
		Long: `Print a machine's console: of the run that goes on and of the last five that ended,
oldest first. A run ends when the machine stops, is suspended or is restored; --tail
counts its lines from the end of the newest. A machine that continued from its
image's kept boot, or from a checkpoint, has said nothing before; one line on stderr
says so where there is nothing to print.

With --route print what came through a route of the machine, a line for each: time,
client, method, path without the query, protocol, status, bytes of the answer,
duration, and what went wrong. A line of a TCP route has the bytes to the machine and
from it. The last 0.5 to 1 MiB of each route are kept, as long as the machine is.

With --network print which destinations the machine was refused, and why, since its
monitor began; the last one first. See "holdpoint run" for the networks there are.`,
		MinArgs: 1, MaxArgs: 1,
		Object: view.Logged{}, Kinds: []errdefs.Kind{errdefs.NotFound, errdefs.WrongState, errdefs.Unsupported, errdefs.Storage}, Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error {
			if o.tail == 0 && cmd.Flags().Changed("tail") {
				return errdefs.New(errdefs.Invalid, "logs %s: --tail 0: give how many lines, 1 or more, or leave it out for all", args[0])
			}
			return runLogs(ctx, a, args[0], o)
		},
	})
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "go on with what comes")
	cmd.Flags().BoolVar(&o.network, "network", false, "what the network refused instead")
	cmd.Flags().StringVar(&o.route, "route", "", "what came through the route with this host name or address instead")
	cmd.Flags().Uint32VarP(&o.tail, "tail", "n", 0, "only the last lines, 1 or more (default all)")
	return cmd
}

func runLogs(ctx context.Context, a *app.App, machine string, o logsOptions) error {
	if o.network && (o.follow || o.tail > 0 || o.route != "") {
		return errdefs.New(errdefs.Invalid, "logs %s: --network goes with none of --follow, --tail and --route", machine)
	}
	if o.network {
		return runRefusals(ctx, a, machine)
	}
	if o.follow && a.JSON {
		return errdefs.New(errdefs.Invalid, "logs %s: --follow and --json exclude each other", machine)
	}
	return a.Once(ctx, func(ctx context.Context, c *client.Client) error {
		stream, err := c.Guest.Logs(ctx, connect.NewRequest(&holdpointv1.GuestLogsRequest{
			Machine: machine, Follow: o.follow, Tail: o.tail, Route: o.route,
		}))
		if err != nil {
			return err
		}
		defer stream.Close()
		var kept bytes.Buffer
		var out io.Writer = a.Config.Stdout
		switch {
		case a.JSON:
			out = &kept
		case terminal.Is(a.Config.Stdout):
			out = view.Harmless(out)
		}
		for stream.Receive() {
			if why := stream.Msg().GetSilent(); why != "" {
				a.Say(why)
			}
			if _, err := out.Write(stream.Msg().GetData()); err != nil {
				return fmt.Errorf("print the log: %w", err)
			}
		}
		if err := stream.Err(); err != nil && (!o.follow || !errors.Is(ctx.Err(), context.Canceled)) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if a.JSON {
			return a.PrintJSON(view.Logged{Header: view.NewHeader(), Machine: machine, Log: kept.String(), Refusals: []view.Refusal{}})
		}
		return nil
	})
}

func runRefusals(ctx context.Context, a *app.App, machine string) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		resp, err := c.Machines.Network(ctx, connect.NewRequest(&holdpointv1.GetMachineRequest{Machine: machine}))
		if err != nil {
			return err
		}
		n := resp.Msg
		o := app.Output{
			Object: view.Logged{
				Header: view.NewHeader(), Machine: machine,
				Refused: n.GetTotal(), Refusals: view.List(n.GetRefusals(), view.RefusalOf),
			},
			Human: func(w io.Writer) error { return view.Refusals(w, n) },
		}
		for _, r := range n.GetRefusals() {
			o.Terse = append(o.Terse, r.GetTo())
		}
		return a.Print(o)
	})
}
