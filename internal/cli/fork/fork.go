// Package fork has the verb fork: it makes many machines of one checkpoint, and
// runs a command in each. It makes nothing itself; the daemon does.
package fork

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/shellwords"
)

type options struct {
	machine string
	count   uint32
	name    string
	remove  bool
	asIs    bool
	detach  bool
}

// NewFork is the verb `fork`.
func NewFork(a *app.App) *cobra.Command {
	var o options
	var cmd *cobra.Command
	cmd = a.Command(app.Verb{
		Use: "fork [CHECKPOINT] [flags] [-- COMMAND [ARG...]]", Short: "Make new machines from a checkpoint",
		Long: `Make new machines from a checkpoint, called NAME-1 to NAME-COUNT. Without --name that
is the name of the checkpoint's machine; where one of these names is taken, four
characters are put before all the numbers: web-2934-1. With --name a machine whose
name is taken is not made.

Those of a full checkpoint continue from there and share its memory; those of a disk
checkpoint boot. Each has an identity, entropy and a clock of its own before it is
handed out; routes are not copied. What the checkpoint's machine was asked to be,
such as its memory and --suspend-after, they are, too. Without CHECKPOINT, --machine says of which machine: one that
runs is checkpointed first, once, and goes on; a suspended one stays suspended.

Each machine can fail alone: the others are made all the same, a line on stderr
says why, and the exit code is that of the first failure.

With COMMAND it runs in every machine, with FORK_INDEX set to 1, 2, … there, and
without input. Its output comes here line by line, each with the machine's name
before it; with --json at the end, of each command at most 1 MiB of each output.
Signals are passed on to all commands. With --detach the commands go on by
themselves, for "holdpoint attach", and their ids are printed.

The machines stay when the command has ended, also with --rm: that removes each
when it is stopped, as by "holdpoint stop".
--request-id makes the machines once; a command runs each time.`,
		Example: `  holdpoint fork tests-green --count 8 --name try -- ./run-variant
  holdpoint fork --machine web --rm
  holdpoint fork tests-green --count 3 --json -- sh -c 'echo $FORK_INDEX'`,
		MaxArgs: -1, Effect: true, PassesCodeOf: true, Object: view.Forked{}, Complete: app.First(a.CheckpointNames),
		Kinds: app.MachineKinds(errdefs.AlreadyExists, errdefs.Unsupported, errdefs.Incompatible, errdefs.NoSpace),
		Run: func(ctx context.Context, args []string) error {
			point, argv, err := parse(args, cmd.ArgsLenAtDash())
			if err == nil {
				err = o.check(point, cmd.Flags().Changed("count"))
			}
			if err != nil {
				return err
			}
			return runFork(ctx, a, o, point, argv)
		},
	})
	f := cmd.Flags()
	f.StringVar(&o.machine, "machine", "", "the machine to fork, or the checkpoint's where more than one has the name")
	f.Uint32Var(&o.count, "count", 1, "how many machines, 1 to 256")
	f.StringVar(&o.name, "name", "", "what the machines are called, with a number added (default the source's name)")
	f.BoolVar(&o.remove, "rm", false, "remove each machine when it stops")
	f.BoolVar(&o.asIs, "as-is", false, "hand the machines out without proof that identity, clock and entropy are new")
	f.BoolVar(&o.detach, "detach", false, "let the commands go on by themselves")
	a.CompleteFlag(cmd, "machine", a.MachineNames)
	return cmd
}

// parse parts the arguments into the checkpoint, "" for none, and the command,
// nil for none; dash is how many stood before --, negative without it.
func parse(args []string, dash int) (point string, argv []string, err error) {
	before := args
	if dash >= 0 {
		before, argv = args[:dash], args[dash:]
		if len(argv) == 0 {
			return "", nil, errdefs.New(errdefs.Invalid, "fork: the command after -- is missing")
		}
	}
	if len(before) > 1 {
		return "", nil, errdefs.New(errdefs.Invalid, "fork: %q is too much; write -- before a command: `holdpoint fork %s -- %s`",
			before[1], shellwords.Quote(before[0]), shellwords.Quote(before[1:]...))
	}
	return app.Optional(before), argv, nil
}

func (o *options) check(point string, counted bool) error {
	switch {
	case point == "" && o.machine == "":
		return errdefs.New(errdefs.Invalid, "fork: of what? name a checkpoint (`holdpoint checkpoint ls` lists them), or a machine with --machine")
	case counted && o.count == 0:
		return errdefs.New(errdefs.Invalid, "fork: --count 0 makes nothing; use 1 to 256")
	}
	return nil
}

func runFork(ctx context.Context, a *app.App, o options, point string, argv []string) error {
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, c.Machines.Fork, &holdpointv1.ForkRequest{
			RequestId: a.RequestID(), Checkpoint: point, Machine: o.machine, Count: o.count, Name: o.name,
			RemoveOnStop: o.remove, AsIs: o.asIs,
		})
		if err != nil {
			return o.explain(ctx, c, point, err)
		}
		r := report{app: a, op: op, argv: argv, children: make([]child, len(op.GetResult().GetForks()))}
		for i, f := range op.GetResult().GetForks() {
			r.children[i].fork = f
		}
		r.begin()
		if argv != nil {
			if err := r.run(ctx, c, o.detach); err != nil {
				return err
			}
		}
		return r.end()
	})
}

// explain says what to type where a machine was named in a checkpoint's place.
func (o *options) explain(ctx context.Context, c *client.Client, point string, err error) error {
	if client.KindOf(err) != errdefs.NotFound || point == "" || o.machine != "" {
		return err
	}
	m, none := app.GetMachine(ctx, c, point)
	if none != nil {
		return err
	}
	return errdefs.New(errdefs.NotFound, "fork: there is no checkpoint %s; to fork the machine %s as it is now: `holdpoint fork --machine %s`",
		point, m.GetName(), m.GetName())
}

// fail names the machine in an error of one's own.
func fail(name, message string) string {
	return fmt.Sprintf("%s: %s", name, view.Line(message))
}
