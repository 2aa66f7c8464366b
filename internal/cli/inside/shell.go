package inside

import (
	"context"

	"github.com/spf13/cobra"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/guest"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/shellwords"
)

// NewShell is the verb `shell`.
func NewShell(a *app.App) *cobra.Command {
	var user string
	cmd := a.Command(app.Verb{
		Use: "shell MACHINE [flags]", Short: "Open a login shell in a machine",
		Long: `Open a login shell in a machine. When standard input is no terminal, the shell
reads its commands from there. In a machine of an image with an environment of its
own, such as an imported container image, it is no login shell, which keeps that.`,
		MinArgs: 1, MaxArgs: 1, PassesCode: true, Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error { return runShell(ctx, a, args[0], user) },
	})
	cmd.Flags().StringVarP(&user, "user", "u", "", "user to log in as (default the image's, or root)")
	return cmd
}

func runShell(ctx context.Context, a *app.App, machine, user string) error {
	if a.JSON {
		return errdefs.New(errdefs.Invalid, "shell in %s: a shell is for people; use `holdpoint exec --json`", machine)
	}
	start := &agentv1.ExecStart{
		Argv: shellwords.LoginShell(), User: user, Tty: terminal.Is(a.Config.Stdin),
	}
	return execute(ctx, a, &guest.Exec{Verb: "shell", Machine: machine, Start: start}, true)
}
