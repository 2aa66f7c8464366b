package history

import (
	"context"
	"fmt"
	"io"
	"slices"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

type restoreOptions struct {
	disk, full bool
	plan       bool
	routes     string
	noSafety   bool
	asIs       bool
	yes        bool
}

// NewRestore is the verb `restore`.
func NewRestore(a *app.App) *cobra.Command {
	var o restoreOptions
	cmd := a.Command(app.Verb{
		Use: "restore MACHINE CHECKPOINT --disk|--full [flags]", Short: "Put a machine back to a checkpoint",
		Long: `Put a machine back to one of its checkpoints.

--disk ("Restore disk") puts the disk back and boots from it. --full ("Restore
machine") puts memory and CPU back, too: what ran at the checkpoint runs on, but
for its connections to the outside, which are closed. A full checkpoint can be
restored either way, a disk checkpoint with --disk only (else KIND_MISMATCH); of a
full one --disk gives the disk as after a power cut. Effects outside the machine
stay.

The present state is kept as a checkpoint first, and the command that undoes the
restore is printed. Routes stay as they are now, unless --routes=restore; what
that means for each URL is shown before anything is done. It is asked before the
present state is discarded; without a terminal --yes is needed. A stopped or
suspended machine is started.

With --full the machine is handed out once its guest has acknowledged the right time
and fresh entropy; one that does not is given up, and the machine goes on as it was.
--as-is does without: the guest's clock stays at the checkpoint, and what it draws
at random may repeat.

Of the plan's columns THEN is the route's port at the checkpoint, NOW the port it has
now, and LISTENING AFTER whether something will listen in the restored machine on
the port the route has then: yes, if something that the boot starts by itself
listened on it when the checkpoint was made; no, if the route will lead nowhere in
this machine; unknown otherwise. The warnings say which URLs would be broken.`,
		Example: `  holdpoint restore web before-agent --disk --plan
  holdpoint restore web before-agent --disk --routes=restore --yes
  holdpoint restore web last --full`,
		MinArgs: 2, MaxArgs: 2, Effect: true, Cancels: true, Object: view.Restored{}, PlanObject: view.RestorePlan{}, Complete: a.CompleteRestore,
		Kinds: app.MachineKinds(errdefs.Conflict, errdefs.Unsupported, errdefs.KindMismatch, errdefs.Incompatible, errdefs.NoSpace),
		Run:   func(ctx context.Context, args []string) error { return runRestore(ctx, a, args[0], args[1], o) },
	})
	f := cmd.Flags()
	f.BoolVar(&o.disk, "disk", false, "Restore disk")
	f.BoolVar(&o.full, "full", false, "Restore machine: disk, memory and CPU")
	f.BoolVar(&o.plan, "plan", false, "only show what would happen")
	f.StringVar(&o.routes, "routes", "", "keep: routes stay as they are now (default); restore: they become what they were")
	f.BoolVar(&o.noSafety, "no-safety", false, "do not keep the present state; the restore cannot be undone")
	f.BoolVar(&o.asIs, "as-is", false, "with --full: hand the machine out without proof that clock and entropy are new")
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	a.CompleteFlag(cmd, "routes", app.Words("keep", "restore"))
	return cmd
}

func (o *restoreOptions) kind() string {
	if o.full {
		return "full"
	}
	return "disk"
}

func (o *restoreOptions) asked(starts string) view.Asked {
	return view.Asked{Kind: o.kind(), Routes: o.routes, Safety: !o.noSafety, Starts: starts}
}

func (o *restoreOptions) check(machine string) error {
	switch {
	case o.disk && o.full:
		return errdefs.New(errdefs.Invalid, "restore %s: --disk and --full exclude each other: give one of the two, --full for memory and CPU too", machine)
	case !o.disk && !o.full:
		return errdefs.New(errdefs.Invalid, "restore %s: say what to put back: --disk, or --full for memory and CPU too", machine)
	case o.asIs && o.disk:
		return errdefs.New(errdefs.Invalid, "restore %s: --as-is is for --full only: a restored disk is booted, and what boots has new time and entropy of its own; leave it out", machine)
	case !slices.Contains([]string{"", "keep", "restore"}, o.routes):
		return errdefs.New(errdefs.Invalid, "restore %s: --routes=%s is neither keep nor restore", machine, o.routes)
	}
	return nil
}

func runRestore(ctx context.Context, a *app.App, machine, checkpoint string, o restoreOptions) error {
	if err := o.check(machine); err != nil {
		return err
	}
	req := &holdpointv1.RestoreMachineRequest{
		RequestId: a.RequestID(), Machine: machine, Checkpoint: checkpoint, Kind: o.kind(), Routes: o.routes, NoSafety: o.noSafety, AsIs: o.asIs,
	}
	if o.plan {
		return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
			plan, starts, err := planRestore(ctx, c, false, req)
			if err != nil {
				return err
			}
			return printPlan(a, plan, starts, o)
		})
	}
	return a.With(ctx, func(c *client.Client) error {
		var plan *holdpointv1.RestorePlan
		var starts string
		err := c.Ask(ctx, func(ctx context.Context) (err error) {
			plan, starts, err = planRestore(ctx, c, !a.Repeatable(), req)
			return err
		})
		if err != nil {
			return err
		}
		if err := confirmRestore(a, plan, starts, &o); err != nil {
			return err
		}
		req.Routes = o.routes
		op, err := app.Operate(ctx, a, c, true, c.Machines.Restore, req)
		if err != nil {
			return err
		}
		return printRestored(a, op, o.kind())
	})
}

// planRestore asks what would happen. Unless the request is to be one made
// before, it pins it to what was seen: the machine's generation, and the
// checkpoint by its id. starts is the machine's state where it will be started
// from that; "" when it runs.
func planRestore(ctx context.Context, c *client.Client, pin bool, req *holdpointv1.RestoreMachineRequest) (plan *holdpointv1.RestorePlan, starts string, err error) {
	ctx, stop := app.Interruptible(ctx)
	defer stop()
	m, err := app.GetMachine(ctx, c, req.GetMachine())
	if err != nil {
		return nil, "", err
	}
	res, err := c.Machines.PlanRestore(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, "", err
	}
	if pin {
		req.Generation, req.Checkpoint = m.GetGeneration(), res.Msg.GetCheckpoint().GetId()
	}
	if state := m.GetState(); state == "stopped" || state == "suspended" {
		starts = state
	}
	return res.Msg, starts, nil
}

// confirmRestore tells what will happen, and asks unless --yes said it already.
func confirmRestore(a *app.App, plan *holdpointv1.RestorePlan, starts string, o *restoreOptions) error {
	if o.yes {
		for _, warning := range view.RestoreWarnings(plan, o.asked(starts)) {
			a.Say("warning: " + warning)
		}
		return nil
	}
	if !a.Interactive() {
		return errdefs.New(errdefs.Invalid,
			"restore %s: it discards the present state of the machine; look at it with --plan, then give --yes", plan.GetMachine())
	}
	if err := view.PrintPlan(a.Config.Stderr, plan, o.asked(starts)); err != nil {
		return err
	}
	if o.routes == "" && slices.ContainsFunc(plan.GetRoutes(), view.RouteDiffers) {
		back, err := a.Ask("Put the routes back to what they were, too?")
		if err != nil {
			return err
		}
		if o.routes = "keep"; back {
			o.routes = "restore"
		}
	}
	yes, err := a.Ask(view.RestoreTitle(o.kind()) + " of " + plan.GetMachine() + " now?")
	if err != nil {
		return err
	}
	if !yes {
		return errdefs.New(errdefs.Interrupted, "restore %s: not done; nothing was changed", plan.GetMachine())
	}
	return nil
}

func printPlan(a *app.App, plan *holdpointv1.RestorePlan, starts string, o restoreOptions) error {
	out := app.Output{
		Object: view.RestorePlan{
			Header: view.NewHeader(), Machine: plan.GetMachine(), Checkpoint: view.CheckpointOf(plan.GetCheckpoint()), Starts: starts != "",
			Routes: view.List(plan.GetRoutes(), view.RouteChangeOf),
			Newer:  view.List(plan.GetNewer(), view.CheckpointOf), Commands: view.Notes(plan.GetCommands()), CommandsUnknown: plan.GetCommandsUnknown(),
			Effects: view.List(plan.GetEffects(), view.EffectOf),
		},
		Human: func(w io.Writer) error { return view.PrintPlan(w, plan, o.asked(starts)) },
	}
	return a.Print(out)
}

func printRestored(a *app.App, op *client.Operation, kind string) error {
	r, notes := op.GetResult().GetRestore(), op.GetResult().GetNotes()
	a.Note(notes)
	return a.Print(app.Output{
		Object: view.Restored{
			Header: view.NewHeader(), Machine: view.MachineOf(op.GetResult().GetMachine()),
			Restored: view.CheckpointOf(r.GetRestored()), Safety: view.CheckpointOf(r.GetSafety()),
			UndoCommand: r.GetUndoCommand(), Routes: view.List(r.GetPlan().GetRoutes(), view.RouteChangeOf),
			Generation: r.GetGeneration(), DowntimeMS: r.GetDowntimeMs(), RunningMS: r.GetRunningMs(), AnswerMS: r.GetAnswerMs(),
			Closed: r.GetClosedSockets(), From: r.GetFrom(), Operation: op.GetId(), Notes: view.Notes(notes),
		},
		Terse: []string{r.GetSafety().GetId()},
		Human: func(w io.Writer) error {
			kept := "nothing (--no-safety)"
			if s := r.GetSafety(); s != nil {
				kept = fmt.Sprintf("%s (%s)", view.NameOf(s), view.KindOf(s))
			}
			what := view.KindOf(r.GetRestored())
			if kind == "disk" && r.GetRestored().GetKind() == "full" {
				what = "the disk of a full one, as after a power cut"
			}
			return view.Fields(w, [][2]string{
				{"restored", fmt.Sprintf("%s to %s (%s)", op.GetMachine(), view.NameOf(r.GetRestored()), what)},
				{"kept before", kept},
				{"downtime", view.Millis(r.GetDowntimeMs())},
				{"ran", ran(r)},
				{"connections closed", closed(r)},
				{"undo with", r.GetUndoCommand()},
			})
		},
	})
}

// ran says when a machine with its memory ran and answered, and from what; ""
// where only the disk was restored.
func ran(r *holdpointv1.RestoreResult) string {
	if r.GetRunningMs() == 0 {
		return ""
	}
	text := fmt.Sprintf("after %s, answered after %s", view.Millis(r.GetRunningMs()), view.Millis(r.GetAnswerMs()))
	switch r.GetFrom() {
	case "standby":
		return text + " (from a standby)"
	case "memory-file":
		return text + " (from its memory file)"
	case "layers":
		return text + " (from its layers)"
	}
	return text
}

// closed says how many connections the machine had to give up; "" for none.
func closed(r *holdpointv1.RestoreResult) string {
	if r.GetClosedSockets() == 0 {
		return ""
	}
	return fmt.Sprintf("%d to the outside, which were open at the checkpoint", r.GetClosedSockets())
}
