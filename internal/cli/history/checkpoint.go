// Package history has the verbs of checkpoints, and of what a restore concerns
// besides the disk: routes.
package history

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// NewCheckpointList is the verb `checkpoint ls`.
func NewCheckpointList(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "ls [MACHINE]", Short: "List checkpoints, newest first", MaxArgs: 1,
		Object: view.Checkpoints{}, Kinds: []errdefs.Kind{errdefs.NotFound}, Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error { return runCheckpointList(ctx, a, app.Optional(args)) },
	})
}

func runCheckpointList(ctx context.Context, a *app.App, machine string) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Checkpoints.List(ctx, connect.NewRequest(&holdpointv1.ListCheckpointsRequest{Machine: machine}))
		if err != nil {
			return err
		}
		checkpoints := res.Msg.GetCheckpoints()
		o := app.Output{Object: view.Checkpoints{Header: view.NewHeader(), Checkpoints: view.List(checkpoints, view.CheckpointOf)}}
		rows := make([][]string, 0, len(checkpoints))
		for _, p := range checkpoints {
			o.Terse = append(o.Terse, p.GetId())
			current := ""
			if p.GetCurrent() {
				current = "head"
			}
			rows = append(rows, []string{
				view.Short(p.GetId()), view.Dash(p.GetName()), p.GetMachine(), view.KindOf(p), view.Dash(view.Verification(p)),
				view.Age(view.TimeOf(p.GetCreatedAt()), time.Now()), view.Size(p.GetDiskBytes()), memory(p),
				view.Dash(view.Standbys(p)), view.Dash(current), view.Message(p),
			})
		}
		o.Human = func(w io.Writer) error {
			return view.Table(w, []string{
				"ID", "NAME", "MACHINE", "KIND", "VERIFICATION", "CREATED", "DISK", "MEMORY", "STANDBYS", "HEAD", "MESSAGE",
			}, rows)
		}
		warnOfFailed(a, checkpoints...)
		return a.Print(o)
	})
}

// warnOfFailed says loudly which checkpoints may not be restorable.
func warnOfFailed(a *app.App, checkpoints ...*holdpointv1.Checkpoint) {
	for _, p := range checkpoints {
		if warning := view.FailedWarning(p); warning != "" {
			a.Say("warning: " + warning)
		}
	}
}

// NewCheckpointShow is the verb `checkpoint show`.
func NewCheckpointShow(a *app.App) *cobra.Command {
	var machine string
	cmd := a.Command(app.Verb{
		Use: "show CHECKPOINT [flags]", Short: "Show a checkpoint", MinArgs: 1, MaxArgs: 1,
		Object: view.CheckpointObject{}, Kinds: []errdefs.Kind{errdefs.NotFound}, Complete: app.First(a.CheckpointNames),
		Run: func(ctx context.Context, args []string) error { return runCheckpointShow(ctx, a, args[0], machine) },
	})
	machineFlag(a, cmd, &machine)
	return cmd
}

// machineFlag adds --machine, for names that more than one machine has.
func machineFlag(a *app.App, cmd *cobra.Command, machine *string) {
	cmd.Flags().StringVar(machine, "machine", "", "the checkpoint's machine, where more than one has the name")
	a.CompleteFlag(cmd, "machine", a.MachineNames)
}

func runCheckpointShow(ctx context.Context, a *app.App, checkpoint, machine string) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Checkpoints.Get(ctx, connect.NewRequest(&holdpointv1.GetCheckpointRequest{Checkpoint: checkpoint, Machine: machine}))
		if err != nil {
			return err
		}
		p := res.Msg
		warnOfFailed(a, p)
		return a.Print(app.Output{
			Object: view.CheckpointObject{Header: view.NewHeader(), Checkpoint: view.CheckpointOf(p)},
			Terse:  []string{p.GetId()},
			Human:  func(w io.Writer) error { return view.Fields(w, checkpointFields(p)) },
		})
	})
}

func checkpointFields(p *holdpointv1.Checkpoint) [][2]string {
	fields := [][2]string{
		{"id", p.GetId()},
		{"name", p.GetName()},
		{"kind", view.KindOf(p)},
		{"machine", p.GetMachine()},
		{"message", p.GetMessage()},
		{"created", view.Age(view.TimeOf(p.GetCreatedAt()), time.Now())},
		{"parent", p.GetParent()},
		{"image", p.GetImageBuildId()},
		{"stored", stored(p.GetDiskBytes(), p.GetMemoryBytes())},
		{"layers", strings.Join(p.GetLayers(), " ")},
		{"hooks failed", p.GetHookFailure()},
	}
	if p.GetAutomatic() {
		fields = append(fields, [2]string{"made", "by holdpoint itself"})
	}
	if p.GetCurrent() {
		fields = append(fields, [2]string{"head", "yes, the machine continues from here"})
	}
	fields = append(fields, view.FullFields(p)...)
	fields = append(fields, view.SpecFields(p.GetSpec())...)
	for _, r := range p.GetRoutes() {
		fields = append(fields, [2]string{"route then", fmt.Sprintf("%s → port %d", r.GetHost(), r.GetPort())})
	}
	return append(fields, [2]string{"restore", restoreCommand(p)})
}

// memory says how many bytes of memory a full checkpoint adds; "-" of others.
func memory(p *holdpointv1.Checkpoint) string {
	if p.GetKind() != "full" {
		return "-"
	}
	return view.Size(p.GetMemoryBytes())
}

// stored says how many bytes a checkpoint adds, of disk and of memory.
func stored(disk, memory int64) string {
	if memory == 0 {
		return view.Size(disk)
	}
	return fmt.Sprintf("%s (disk %s, memory %s)", view.Size(disk+memory), view.Size(disk), view.Size(memory))
}

// restoreCommand is what a person types to go back.
func restoreCommand(p *holdpointv1.Checkpoint) string {
	return fmt.Sprintf("holdpoint restore %s %s --%s", p.GetMachine(), view.NameOf(p), p.GetKind())
}

// NewCheckpointRemove is the verb `checkpoint rm`.
func NewCheckpointRemove(a *app.App) *cobra.Command {
	var machine string
	cmd := a.Command(app.Verb{
		Use: "rm CHECKPOINT [flags]", Short: "Forget a checkpoint",
		Long: `Forget a checkpoint; this cannot be undone. Forks of it and later checkpoints stay
whole, and space is freed as far as nothing else needs it. It is refused while a
machine is suspended in the checkpoint, and while an operation uses it.`,
		MinArgs: 1, MaxArgs: 1, Effect: true,
		Object: view.CheckpointRemoved{}, Complete: app.First(a.CheckpointNames),
		Kinds: []errdefs.Kind{errdefs.NotFound, errdefs.RequestIDConflict, errdefs.MachineBusy, errdefs.Referenced, errdefs.Storage},
		Run: func(ctx context.Context, args []string) error {
			return runCheckpointRemove(ctx, a, args[0], machine)
		},
	})
	machineFlag(a, cmd, &machine)
	return cmd
}

func runCheckpointRemove(ctx context.Context, a *app.App, checkpoint, machine string) error {
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, c.Checkpoints.Remove, &holdpointv1.RemoveCheckpointRequest{
			RequestId: a.RequestID(), Checkpoint: checkpoint, Machine: machine,
		})
		if err != nil {
			return err
		}
		p, notes := op.GetResult().GetCheckpoint().GetCheckpoint(), op.GetResult().GetNotes()
		a.Note(notes)
		return a.Print(app.Output{
			Object: view.CheckpointRemoved{
				Header: view.NewHeader(), Checkpoint: view.CheckpointOf(p), Operation: op.GetId(), Notes: view.Notes(notes),
			},
			Terse: []string{p.GetId()},
			Human: func(w io.Writer) error {
				what := p.GetId()
				if p.GetName() != "" {
					what += " (" + p.GetName() + ")"
				}
				return view.Fields(w, [][2]string{{"removed", what + " of " + p.GetMachine()}})
			},
		})
	})
}
