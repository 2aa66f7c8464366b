package machines

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// lifecycleKinds are the failures of verbs that change a machine's state.
func MachineKinds(more ...errdefs.Kind) []errdefs.Kind {
	return append([]errdefs.Kind{
		errdefs.NotFound, errdefs.RequestIDConflict, errdefs.MachineBusy, errdefs.WrongState,
		errdefs.OutcomeUnknown, errdefs.Storage, errdefs.Deadline,
	}, more...)
}

type stopOptions struct {
	force   bool
	timeout time.Duration
}

// NewStop is the verb `stop`.
func NewStop(a *app.App) *cobra.Command {
	var o stopOptions
	var cmd *cobra.Command
	cmd = a.Command(app.Verb{
		Use: "stop MACHINE [flags]", Short: "Shut a machine down", MinArgs: 1, MaxArgs: 1, Effect: true,
		Object: view.MachineDone{}, Kinds: app.MachineKinds(), Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error {
			if cmd.Flags().Changed("timeout") && o.timeout < time.Millisecond {
				return errdefs.New(errdefs.Invalid, "stop %s: --timeout %s is too short; --force ends it at once", args[0], o.timeout)
			}
			return runStop(ctx, a, args[0], o)
		},
	})
	cmd.Flags().BoolVar(&o.force, "force", false, "end it at once, as a power cut would")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 0, "how long the machine may take (default 60s)")
	return cmd
}

func runStop(ctx context.Context, a *app.App, machine string, o stopOptions) error {
	req := &holdpointv1.StopMachineRequest{
		RequestId: a.RequestID(), Machine: machine, Force: o.force, TimeoutMillis: o.timeout.Milliseconds(),
	}
	return operateMachine(ctx, a, func(c *client.Client) app.Admission[holdpointv1.StopMachineRequest] { return c.Machines.Stop }, req)
}

// NewPause is the verb `pause`.
func NewPause(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "pause MACHINE", Short: "Halt a machine's CPUs", MinArgs: 1, MaxArgs: 1, Effect: true,
		Object: view.MachineDone{}, Kinds: app.MachineKinds(), Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error {
			req := &holdpointv1.PauseMachineRequest{RequestId: a.RequestID(), Machine: args[0]}
			return operateMachine(ctx, a, func(c *client.Client) app.Admission[holdpointv1.PauseMachineRequest] { return c.Machines.Pause }, req)
		},
	})
}

// NewResume is the verb `resume`.
func NewResume(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "resume MACHINE", Short: "Let a paused or suspended machine go on",
		Long: `Let a paused machine go on, or a suspended one from where it was suspended. A
suspended one answers when this is done; its clock is right and it has fresh
entropy.`,
		MinArgs: 1, MaxArgs: 1, Effect: true, Object: view.MachineDone{}, Complete: app.First(a.MachineNames),
		Kinds: app.MachineKinds(errdefs.Unsupported, errdefs.Incompatible, errdefs.NoSpace),
		Run: func(ctx context.Context, args []string) error {
			req := &holdpointv1.ResumeMachineRequest{RequestId: a.RequestID(), Machine: args[0]}
			return operateMachine(ctx, a, func(c *client.Client) app.Admission[holdpointv1.ResumeMachineRequest] { return c.Machines.Resume }, req)
		},
	})
}

// NewSuspend is the verb `suspend`.
func NewSuspend(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "suspend MACHINE", Short: "Keep a machine's memory and end its process",
		Long: `Make a full checkpoint of a machine and end its process, so that it uses neither
CPU nor memory. "holdpoint resume" lets it go on from there, also after the host was
restarted. One that is suspended already stays so; one that is paused runs when it is
resumed.

"run --suspend-after" suspends a machine whenever it is idle; a detached command
counts as use, what --on-boot has started does not. One that is paused does not fall
asleep. Each time one automatic checkpoint is made, which stays until it is removed
with "holdpoint checkpoint rm".`,
		MinArgs: 1, MaxArgs: 1, Effect: true, Object: view.Suspended{}, Complete: app.First(a.MachineNames),
		Kinds: app.MachineKinds(errdefs.Unsupported, errdefs.NoSpace),
		Run:   func(ctx context.Context, args []string) error { return runSuspend(ctx, a, args[0]) },
	})
}

func runSuspend(ctx context.Context, a *app.App, machine string) error {
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, c.Machines.Suspend, &holdpointv1.SuspendMachineRequest{RequestId: a.RequestID(), Machine: machine})
		if err != nil {
			return err
		}
		m, took, notes := op.GetResult().GetMachine(), op.GetResult().GetCheckpoint(), op.GetResult().GetNotes()
		p := took.GetCheckpoint()
		a.Note(notes)
		return a.Print(app.Output{
			Object: view.Suspended{
				Header: view.NewHeader(), Machine: view.MachineOf(m), Checkpoint: view.CheckpointOf(p), DurableMS: took.GetDurableMs(),
				Operation: op.GetId(), Notes: view.Notes(notes),
			},
			Terse: []string{m.GetName()},
			Human: func(w io.Writer) error {
				return view.Fields(w, [][2]string{
					{"suspended", m.GetName()},
					{"checkpoint", p.GetId()},
					{"resume with", "holdpoint resume " + m.GetName()},
				})
			},
		})
	})
}

// NewRemove is the verb `rm`.
func NewRemove(a *app.App) *cobra.Command {
	var force bool
	cmd := a.Command(app.Verb{
		Use: "rm MACHINE [flags]", Short: "Remove a machine and its disk",
		Long: `Remove a machine, its disk, its routes and its checkpoints; this cannot be undone.
Without --force it is refused while the machine runs or has checkpoints. Forks of
its checkpoints are machines of their own and stay.`,
		MinArgs: 1, MaxArgs: 1, Effect: true,
		Object: view.MachineRemoved{}, Kinds: app.MachineKinds(errdefs.Referenced), Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error {
			req := &holdpointv1.RemoveMachineRequest{RequestId: a.RequestID(), Machine: args[0], Force: force}
			return runRemove(ctx, a, req)
		},
	})
	cmd.Flags().BoolVar(&force, "force", false, "stop it first if it runs, and remove its checkpoints, too")
	return cmd
}

func runRemove(ctx context.Context, a *app.App, req *holdpointv1.RemoveMachineRequest) error {
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, c.Machines.Remove, req)
		if err != nil {
			return err
		}
		m, count, notes := op.GetResult().GetMachine(), op.GetResult().GetRemovedCheckpoints(), op.GetResult().GetNotes()
		a.Note(notes)
		return a.Print(app.Output{
			Object: view.MachineRemoved{
				Header: view.NewHeader(), Machine: view.MachineOf(m), RemovedCheckpoints: count, Operation: op.GetId(), Notes: view.Notes(notes),
			},
			Terse: []string{m.GetName()},
			Human: func(w io.Writer) error {
				with := ""
				if count > 0 {
					with = ", with " + view.Count(int(count), "checkpoint")
				}
				return view.Fields(w, [][2]string{{"removed", m.GetName() + with}})
			},
		})
	})
}

// operateMachine runs an operation on one machine that prints nothing for
// people when it is done.
func operateMachine[Request any](ctx context.Context, a *app.App, call func(*client.Client) app.Admission[Request], req *Request) error {
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, call(c), req)
		if err != nil {
			return err
		}
		return printMachine(a, op, nil)
	})
}
