package machines

import (
	"context"

	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// NewRename is the verb `rename`.
func NewRename(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "rename MACHINE NAME", Short: "Give a machine another name",
		Long: `Give a machine another name, in whatever state it is; while an operation works on it,
such as a stop or a checkpoint, that is MACHINE_BUSY: try again when it has ended. Its
id, its checkpoints and its published host names stay. Inside, the host name stays what
it is until the machine is next started with "holdpoint start"; a restore of the disk
starts it, too.`,
		MinArgs: 2, MaxArgs: 2, Effect: true, Object: view.MachineDone{}, Complete: app.First(a.MachineNames),
		Kinds: app.MachineKinds(errdefs.AlreadyExists),
		Run: func(ctx context.Context, args []string) error {
			req := &holdpointv1.RenameMachineRequest{RequestId: a.RequestID(), Machine: args[0], Name: args[1]}
			return operateMachine(ctx, a, func(c *client.Client) app.Admission[holdpointv1.RenameMachineRequest] { return c.Machines.Rename }, req)
		},
	})
}
