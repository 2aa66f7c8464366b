package machines

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
)

// NewList is the verb `ls`.
func NewList(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "ls", Short: "List machines, and below the list what troubles one of them", Object: view.Machines{},
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
		rows, troubles := make([][]string, 0, len(machines)), [][2]string{}
		for _, m := range machines {
			o.Terse = append(o.Terse, m.GetName())
			if m.GetTrouble() != "" {
				troubles = append(troubles, [2]string{m.GetName(), m.GetTrouble()})
			}
			image := m.GetImage()
			if image == m.GetImageBuildId() {
				image = view.Short(image) // another build has its name now
			}
			rows = append(rows, []string{
				m.GetName(), view.Short(m.GetId()), m.GetState(), image, view.Dash(view.Short(m.GetForkedFrom())), view.Size(m.GetSpec().GetMemoryBytes()),
				view.Age(view.TimeOf(m.GetCreatedAt()), time.Now()), urls(m.GetRoutes()),
			})
		}
		o.Human = func(w io.Writer) error {
			err := view.Table(w, []string{"NAME", "ID", "STATE", "IMAGE", "FORK OF", "MEMORY", "CREATED", "ROUTES"}, rows)
			if err != nil || len(troubles) == 0 {
				return err
			}
			_, err = fmt.Fprintln(w)
			return errors.Join(err, view.Fields(w, troubles))
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
