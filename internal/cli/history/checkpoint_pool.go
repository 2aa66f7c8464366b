package history

import (
	"context"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// maxPool is how many standbys the API allows.
const maxPool = 64

// NewCheckpointPool is the verb `checkpoint pool`.
func NewCheckpointPool(a *app.App) *cobra.Command {
	var machine string
	cmd := a.Command(app.Verb{
		Use: "pool CHECKPOINT COUNT [flags]", Short: "Keep standbys of a checkpoint ready",
		Long: `Keep COUNT standbys of a full checkpoint ready, and wait until they are: machines
that are loaded and have never run. The next restore or fork of the checkpoint takes
one and need only let it go; another takes its place in the background. Each needs
some memory of the host. COUNT is 0 to 64; 0 ends the pool.`,
		Example: `  holdpoint checkpoint pool ready 4
  holdpoint checkpoint pool ready 0`,
		MinArgs: 2, MaxArgs: 2, Effect: true, Object: view.CheckpointDone{}, Complete: app.First(a.CheckpointNames),
		Kinds: app.MachineKinds(errdefs.Unsupported, errdefs.KindMismatch, errdefs.Incompatible, errdefs.NoSpace),
		Run: func(ctx context.Context, args []string) error {
			return runCheckpointPool(ctx, a, args[0], args[1], machine)
		},
	})
	machineFlag(a, cmd, &machine)
	return cmd
}

func runCheckpointPool(ctx context.Context, a *app.App, checkpoint, count, machine string) error {
	number, err := strconv.ParseUint(count, 10, 32)
	if err != nil || number > maxPool {
		return errdefs.New(errdefs.Invalid, "checkpoint pool %s: %q is not a number from 0 to %d", checkpoint, count, maxPool)
	}
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, c.Checkpoints.SetPool, &holdpointv1.SetPoolRequest{
			RequestId: a.RequestID(), Checkpoint: checkpoint, Machine: machine, Count: uint32(number),
		})
		if err != nil {
			return err
		}
		p, notes := op.GetResult().GetCheckpoint().GetCheckpoint(), op.GetResult().GetNotes()
		a.Note(notes)
		return a.Print(app.Output{
			Object: view.CheckpointDone{
				Header: view.NewHeader(), Checkpoint: view.CheckpointOf(p), Operation: op.GetId(), Notes: view.Notes(notes),
			},
			Terse: []string{p.GetId()},
			Human: func(w io.Writer) error {
				standbys := view.Standbys(p)
				if standbys == "" {
					standbys = "none"
				}
				return view.Fields(w, [][2]string{{"checkpoint", view.NameOf(p)}, {"standbys", standbys}})
			},
		})
	})
}
