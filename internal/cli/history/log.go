package history

import (
	"context"
	"io"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// NewLog is the verb `log`.
func NewLog(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "log [MACHINE]", Short: "Draw the tree of checkpoints",
		Long: `Draw the checkpoints of a machine, or of all, as a tree. Time goes down: below a
checkpoint are those made from it, oldest first, but the line that leads to the
present comes last. "● now" is where the machine is, below its head, which is the
checkpoint it continues from, or below the image; lines beside it are what restores
have left.
With --json and --quiet checkpoints are a list, newest first.`,
		MaxArgs: 1, Object: view.Log{}, Kinds: []errdefs.Kind{errdefs.NotFound}, Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error { return runLog(ctx, a, app.Optional(args)) },
	})
}

func runLog(ctx context.Context, a *app.App, machine string) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		var machines []*holdpointv1.Machine
		if machine != "" {
			m, err := app.GetMachine(ctx, c, machine)
			if err != nil {
				return err
			}
			machines = append(machines, m)
			machine = m.GetId()
		} else {
			res, err := c.Machines.List(ctx, connect.NewRequest(&holdpointv1.ListMachinesRequest{}))
			if err != nil {
				return err
			}
			machines = res.Msg.GetMachines()
		}
		res, err := c.Checkpoints.List(ctx, connect.NewRequest(&holdpointv1.ListCheckpointsRequest{Machine: machine}))
		if err != nil {
			return err
		}
		checkpoints := res.Msg.GetCheckpoints()
		o := app.Output{Object: view.Log{
			Header:   view.NewHeader(),
			Machines: view.List(machines, view.MachineOf), Checkpoints: view.List(checkpoints, view.CheckpointOf),
		}}
		for _, p := range checkpoints {
			o.Terse = append(o.Terse, p.GetId())
		}
		tree := view.Tree{Now: time.Now()}
		if terminal.Styled(a.Config.Stdout) {
			tree.Bold = terminal.Bold
		}
		o.Human = func(w io.Writer) error { return tree.Draw(w, machines, checkpoints) }
		return a.Print(o)
	})
}
