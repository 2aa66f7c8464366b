package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func newCompletion(a *app.App) *cobra.Command {
	var cmd *cobra.Command
	cmd = a.Command(app.Verb{
		Use: "completion bash|zsh|fish", Short: "Print the completion script for a shell",
		Long: `Print the completion script for a shell. It completes verbs, flags, and the names
of machines, images, checkpoints and routes; it never starts a daemon.`,
		Example: `  source <(holdpoint completion bash)
  holdpoint completion fish > ~/.config/fish/completions/holdpoint.fish`,
		MinArgs: 1, MaxArgs: 1, Complete: app.First(app.Words("bash", "zsh", "fish")),
		Run: func(_ context.Context, args []string) error { return runCompletion(a, cmd.Root(), args[0]) },
	})
	return cmd
}

func runCompletion(a *app.App, root *cobra.Command, shell string) error {
	switch shell {
	case "bash":
		return root.GenBashCompletionV2(a.Config.Stdout, true)
	case "zsh":
		return root.GenZshCompletion(a.Config.Stdout)
	case "fish":
		return root.GenFishCompletion(a.Config.Stdout, true)
	}
	return errdefs.New(errdefs.Invalid, "completion %s: use bash, zsh or fish", shell)
}
