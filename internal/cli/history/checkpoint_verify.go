package history

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// NewCheckpointVerify is the verb `checkpoint verify`.
func NewCheckpointVerify(a *app.App) *cobra.Command {
	var machine string
	cmd := a.Command(app.Verb{
		Use: "verify CHECKPOINT [flags]", Short: "Prove that a checkpoint can be restored",
		Long: `Prove that a checkpoint can be restored: the content of every layer is checked
against its digest, and a full checkpoint is restored aside, without a network,
until it answers. The machine itself is not touched. The outcome is recorded; one
that fails is named with what is damaged, and marked in every list.`,
		Example: `  holdpoint checkpoint verify last`,
		MinArgs: 1, MaxArgs: 1, Effect: true, Object: view.CheckpointVerified{}, Complete: app.First(a.CheckpointNames),
		Kinds: app.MachineKinds(errdefs.Unsupported, errdefs.Incompatible, errdefs.NoSpace),
		Run: func(ctx context.Context, args []string) error {
			return runCheckpointVerify(ctx, a, args[0], machine)
		},
	})
	machineFlag(a, cmd, &machine)
	return cmd
}

func runCheckpointVerify(ctx context.Context, a *app.App, checkpoint, machine string) error {
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, c.Checkpoints.Verify, &holdpointv1.VerifyCheckpointRequest{
			RequestId: a.RequestID(), Checkpoint: checkpoint, Machine: machine,
		})
		if err != nil {
			return err
		}
		r, notes := op.GetResult().GetVerify(), op.GetResult().GetNotes()
		p := r.GetCheckpoint()
		a.Note(notes)
		return a.Print(app.Output{
			Object: view.CheckpointVerified{
				Header: view.NewHeader(), Checkpoint: view.CheckpointOf(p), Layers: r.GetLayers(), Bytes: r.GetBytes(),
				Restored: r.GetRestored(), Operation: op.GetId(), Notes: view.Notes(notes),
			},
			Terse: []string{p.GetId()},
			Human: func(w io.Writer) error {
				proven := fmt.Sprintf("%s, %s", view.Count(int(r.GetLayers()), "layer"), view.Size(r.GetBytes()))
				if r.GetRestored() {
					proven += "; restored aside, it answered"
				}
				return view.Fields(w, [][2]string{
					{"verified", fmt.Sprintf("%s of %s (%s)", view.NameOf(p), p.GetMachine(), view.KindOf(p))},
					{"checked", proven},
				})
			},
		})
	})
}
