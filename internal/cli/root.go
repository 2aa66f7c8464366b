// Package cli is the command line: one constructor for each verb, what it
// prints, and its exit codes. It holds no policy of machines; all of that is
// asked of the daemon through the client. Verbs of a machine as a whole are in
// package machines, those that enter it in package inside, those of checkpoints
// and routes in package history, fork in package fork, those of images in
// package images.
package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/fork"
	"github.com/holdpoint/holdpoint/internal/cli/history"
	"github.com/holdpoint/holdpoint/internal/cli/images"
	"github.com/holdpoint/holdpoint/internal/cli/inside"
	"github.com/holdpoint/holdpoint/internal/cli/machines"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Config is what the command line is made with.
type Config = app.Config

// DaemonRun is one run of a daemon.
type DaemonRun = app.DaemonRun

// Main runs one command line and returns the process's exit code.
func Main(cfg Config) int {
	a := app.New(cfg)
	root := newRoot(a)
	root.SetArgs(a.Config.Args)
	cmd, err := root.ExecuteContextC(context.Background())
	return a.Report(cmd, err)
}

// newRoot makes the command with all verbs below it.
func newRoot(a *app.App) *cobra.Command {
	var version bool
	root := &cobra.Command{
		Use:   "holdpoint VERB",
		Short: "Real machines for AI agents, with everything they do undoable",
		Long: `holdpoint runs Linux machines for AI agents and keeps checkpoints of them, so
that what an agent did can be undone.`,
		SilenceErrors: true, SilenceUsage: true, DisableFlagsInUseLine: true,
		CompletionOptions:          cobra.CompletionOptions{DisableDefaultCmd: true},
		Args:                       cobra.ArbitraryArgs,
		SuggestionsMinimumDistance: 2,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case len(args) > 0:
				return errdefs.New(errdefs.Invalid, "%s: there is no such verb%s; see `holdpoint --help`", args[0], app.DidYouMean(cmd, args[0]))
			case version:
				return runVersion(a)
			}
			return cmd.Help()
		},
	}
	root.Flags().BoolVar(&version, "version", false, "print the version of this program, as the verb version does")
	root.SetIn(a.Config.Stdin)
	root.SetOut(a.Config.Stdout)
	root.SetErr(a.Config.Stderr)
	root.SetHelpFunc(a.Help)
	root.SetHelpCommand(&cobra.Command{Use: "help [VERB]", Short: "Print the help of a verb", Hidden: true, RunE: func(cmd *cobra.Command, args []string) error {
		about, rest, err := cmd.Root().Find(args)
		if err != nil || len(rest) > 0 {
			return errdefs.New(errdefs.Invalid, "help %s: there is no such verb; see `holdpoint --help`", strings.Join(args, " "))
		}
		return about.Help()
	}})
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		err = app.FlagProblem(err)
		if cmd.Name() == "exec" {
			return errdefs.New(errdefs.Invalid, "exec: %w; write -- before the command in the machine", err)
		}
		if cmd != root {
			err = fmt.Errorf("%s: %w", app.NameOf(cmd), err)
		}
		return errdefs.New(errdefs.Invalid, "%w; see `%s --help`", err, cmd.CommandPath())
	})
	a.GlobalFlags(root)
	addVerbs(a, root)
	return root
}

func addVerbs(a *app.App, root *cobra.Command) {
	root.AddCommand(
		a.Group("image", "Images that machines start from",
			images.NewBuild(a), images.NewImport(a), images.NewList(a), images.NewInspect(a), images.NewRemove(a)),
		machines.NewRun(a), machines.NewList(a), machines.NewInspect(a), machines.NewStats(a),
		inside.NewExec(a), inside.NewShell(a), inside.NewAttach(a), inside.NewConsole(a), inside.NewCopy(a), inside.NewLogs(a),
		machines.NewStop(a), machines.NewStart(a), machines.NewPause(a), machines.NewResume(a), machines.NewSuspend(a),
		machines.NewRename(a), machines.NewRemove(a),
		a.Group("checkpoint", "Checkpoints of machines",
			history.NewCheckpointCreate(a), history.NewCheckpointList(a), history.NewCheckpointShow(a), history.NewCheckpointVerify(a),
			history.NewCheckpointPool(a), history.NewCheckpointRemove(a)),
		history.NewLog(a), history.NewRestore(a), fork.NewFork(a),
		history.NewExpose(a), history.NewUnexpose(a), history.NewRoutes(a),
		a.Group("operation", "What the daemon is doing and did",
			newOperationList(a), newOperationShow(a), newOperationWait(a), newOperationCancel(a)),
		a.Group("daemon", "The process that looks after machines",
			daemonVerbs(a)...),
		newDoctor(a), newVersion(a), newCompletion(a),
	)
	if a.Config.RunMonitor != nil {
		root.AddCommand(newMonitor(a))
	}
}
