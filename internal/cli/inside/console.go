package inside

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/guest"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// NewConsole is the verb `console`.
func NewConsole(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "console MACHINE", Short: "Sit down at a machine's serial console",
		Long: `Connect this terminal to a machine's serial console, where its kernel writes and
something may ask for a login. Where nothing does, as in the images that holdpoint
builds, Enter gets a root shell; "exit" ends that. With --init system, too, unless the
guest's own settings of serial-getty say otherwise. It does without the agent link,
so that a machine which exec does not reach can be looked into.

There is one place at a console: a second person is refused (MACHINE_BUSY), and reads
it with "holdpoint logs --follow". What is typed waits while a checkpoint holds the
machine; what the console says faster than it is read here is left out, which is told,
and is in the log.

Ctrl-P Ctrl-Q, SIGINT, SIGTERM and SIGHUP leave; a shell that was begun there is there
still for the next one. When the machine reboots the console stays, when it stops
console ends with exit code 0.`,
		MinArgs: 1, MaxArgs: 1, Complete: app.First(a.MachineNames),
		Kinds: []errdefs.Kind{
			errdefs.NotFound, errdefs.Conflict, errdefs.MachineBusy, errdefs.WrongState, errdefs.Unsupported, errdefs.OutcomeUnknown,
		},
		Run: func(ctx context.Context, args []string) error { return runConsole(ctx, a, args[0]) },
	})
}

func runConsole(ctx context.Context, a *app.App, machine string) error {
	switch {
	case a.JSON:
		return errdefs.New(errdefs.Invalid, "console of %s: a console is for people; use `holdpoint exec --json`", machine)
	case !terminal.Is(a.Config.Stdin):
		return errdefs.New(errdefs.Invalid, "console of %s: standard input is no terminal; read the console with `holdpoint logs %s`, run commands with `holdpoint exec %s`", machine, machine, machine)
	}
	e := &guest.Exec{
		Verb: "console", Machine: machine, Console: true, Leave: true, TTYWanted: true,
		Stdin: a.Config.Stdin, Stdout: a.Config.Stdout, Stderr: a.Config.Stderr,
		Begun: func() {
			if !a.Quiet { // the terminal is raw
				fmt.Fprintf(a.Config.Stderr, "console of %s: Enter to begin, Ctrl-P Ctrl-Q to leave\r\n", machine)
			}
		},
	}
	result, err := atTerminal(ctx, a, e)
	switch {
	case err != nil:
		return err
	case result.Left:
		a.Say("left the console of " + machine)
	default:
		a.Say("machine " + machine + " has stopped")
	}
	return nil
}
