package cli

import (
	"context"
	"io"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
)

func newList(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "ls", Short: "List machines", Object: view.Machines{},
		Run: func(ctx context.Context, _ []string) error { return runList(ctx, a) },
	})
}

func runList(ctx context.Context, a *app.App) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Machines.List(ctx, connect.NewRequest(&holdpointv1.ListMachinesRequest{}))
		if err != nil {
			return err
		}
		machines := res.Msg.GetMachines()
		o := app.Output{Object: view.Machines{Header: view.NewHeader(), Machines: view.List(machines, view.MachineOf)}}
		rows := make([][]string, 0, len(machines))
		for _, m := range machines {
			o.Terse = append(o.Terse, m.GetName())
			rows = append(rows, []string{
				m.GetName(), view.Short(m.GetId()), m.GetState(), m.GetImage(), view.Dash(view.Short(m.GetForkedFrom())), view.Size(m.GetSpec().GetMemoryBytes()),
				view.Age(view.TimeOf(m.GetCreatedAt()), time.Now()), urls(m.GetRoutes()),
			})
		}
		o.Human = func(w io.Writer) error {
			return view.Table(w, []string{"NAME", "ID", "STATE", "IMAGE", "FORK OF", "MEMORY", "CREATED", "ROUTES"}, rows)
		}
		return a.Print(o)
	})
}

// urls lists the URLs of routes in one cell.
func urls(routes []*holdpointv1.Route) string {
	text := ""
	for i, r := range routes {
		if i > 0 {
			text += " "
		}
		text += r.GetUrl()
	}
	return text
}
