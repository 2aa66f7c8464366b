// Package inside has the verbs that enter a machine: exec, shell, attach, console,
// cp and logs. How bytes get there is package guest's.
package inside

import (
	"context"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/guest"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/shellwords"
)

type attachOptions struct {
	noHistory   bool
	interactive bool
}

// NewAttach is the verb `attach`.
func NewAttach(a *app.App) *cobra.Command {
	var o attachOptions
	cmd := a.Command(app.Verb{
		Use: "attach MACHINE [COMMAND-ID] [flags]", Short: "Connect to a command that runs in a machine",
		Long: `Connect to a command that was started with "exec --detach", or that ran when the
machine was checkpointed, forked or suspended and goes on: see its output, type to
it if it was started with --interactive or --tty too, and get its exit code.
Without an id it is the only one there is.

Ctrl-P Ctrl-Q on a terminal, a terminal that is closed, and SIGTERM or SIGHUP to
attach leave: the command goes on, and the exit code is 0. SIGINT and SIGQUIT are
passed on to the command; at the third SIGINT in a row attach ends with 130, and
the command goes on.

When the command has ended, its last output and its exit code wait for the first
attach, and are gone after it.`,
		MinArgs: 1, MaxArgs: 2, PassesCode: true, Object: view.Executed{}, Complete: a.CompleteCommand,
		Run: func(ctx context.Context, args []string) error { return runAttach(ctx, a, args, o) },
	})
	cmd.Flags().BoolVar(&o.noHistory, "no-history", false, "leave out the output from before")
	cmd.Flags().BoolVarP(&o.interactive, "interactive", "i", false, "pass standard input on; on a terminal it always is")
	return cmd
}

func runAttach(ctx context.Context, a *app.App, args []string, o attachOptions) error {
	machine := args[0]
	command, err := findCommand(ctx, a, args)
	if err != nil {
		return err
	}
	attach := &agentv1.ExecAttach{CommandId: command.GetId(), NoHistory: o.noHistory}
	onTerminal := terminal.Is(a.Config.Stdin) && !a.JSON
	return execute(ctx, a, &guest.Exec{
		Verb: "attach", Machine: machine, Attach: attach, Leave: onTerminal, TTYWanted: command.GetTty(),
	}, o.interactive || onTerminal)
}

// findCommand is the command of the id, or the only detached one.
func findCommand(ctx context.Context, a *app.App, args []string) (*agentv1.Command, error) {
	machine := args[0]
	var detached []*agentv1.Command
	err := a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Guest.ListCommands(ctx, connect.NewRequest(&holdpointv1.ListGuestCommandsRequest{Machine: machine, Wake: true}))
		if err != nil {
			return err
		}
		for _, command := range res.Msg.GetCommands() {
			if command.GetDetached() && (len(args) == 1 || strings.HasPrefix(command.GetId(), args[1])) {
				detached = append(detached, command)
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return nil, err
	case len(detached) == 1:
		return detached[0], nil
	case len(detached) == 0 && len(args) == 1:
		return nil, errdefs.New(errdefs.NotFound, "attach to %s: no detached command is there; `holdpoint exec %s --detach -- COMMAND` starts one", machine, machine)
	case len(detached) == 0:
		return nil, errdefs.New(errdefs.NotFound, "attach to %s: no detached command has the id %s; it may have ended, and an attach have fetched what it left", machine, args[1])
	}
	candidates := make([]string, len(detached))
	for i, command := range detached {
		candidates[i] = command.GetId() + " (" + shellwords.Name(command.GetArgv()) + ")"
	}
	return nil, errdefs.New(errdefs.Invalid, "attach to %s: say which command: %s", machine, strings.Join(candidates, ", "))
}
