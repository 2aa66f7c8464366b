package app

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Verb describes a command: what its help says and what it runs.
type Verb struct {
	// Use is the usage after the parent's name; its first word is the name.
	Use, Short, Long, Example string
	// MinArgs and MaxArgs count the arguments; MaxArgs < 0 is any number.
	MinArgs, MaxArgs int
	// Kinds are the failures it knows besides those of every verb.
	Kinds []errdefs.Kind
	// Object is a zero value of what --json prints; nil for nothing.
	Object any
	// PlanObject is one of what it prints with --plan; nil where there is no plan.
	PlanObject any
	// Effect says that it changes something and takes --request-id.
	Effect bool
	// Cancels says that Ctrl-C cancels the operation instead of the wait.
	Cancels bool
	// PassesCode says that it exits with the code of a command in the machine.
	PassesCode bool
	// PassesCodeOf says the same of a command line with a command after --.
	PassesCodeOf bool
	Hidden       bool
	// HostArgs says that arguments, and HostFlags which flags, may name files on
	// this host, whose names may be any bytes.
	HostArgs  bool
	HostFlags []string
	// Complete gives candidates for the argument after args.
	Complete func(ctx context.Context, args []string) []string
	Run      func(ctx context.Context, args []string) error
}

// Command makes the cobra command of a verb.
func (a *App) Command(v Verb) *cobra.Command {
	cmd := &cobra.Command{
		Use: v.Use, Short: v.Short, Long: v.Long, Example: v.Example, Hidden: v.Hidden,
		DisableFlagsInUseLine: true,
		Args: func(cmd *cobra.Command, args []string) error {
			return checkArgs(cmd, v, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkText(cmd, v, args); err != nil {
				return err
			}
			return v.Run(cmd.Context(), args)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	if v.Complete != nil {
		cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return v.Complete(cmd.Context(), args), cobra.ShellCompDirectiveNoFileComp
		}
	}
	if v.Effect {
		cmd.Flags().StringVar(&a.requestID, "request-id", "", "give the request this id; the same id again has its effect once")
	}
	a.verbs[cmd] = v
	return cmd
}

func checkArgs(cmd *cobra.Command, v Verb, args []string) error {
	if len(args) >= v.MinArgs && (v.MaxArgs < 0 || len(args) <= v.MaxArgs) {
		return nil
	}
	problem := "something is missing"
	if len(args) > v.MinArgs {
		problem = fmt.Sprintf("%q is too much", args[v.MaxArgs])
	}
	return errdefs.New(errdefs.Invalid, "%s: %s; use it as `%s`", NameOf(cmd), problem, cmd.UseLine())
}

// Group makes a command that only has verbs below it.
func (a *App) Group(name, short string, verbs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: name + " VERB", Short: short, DisableFlagsInUseLine: true,
		Args: cobra.ArbitraryArgs, SuggestionsMinimumDistance: 2,
		RunE: func(cmd *cobra.Command, args []string) error {
			names := make([]string, len(verbs))
			for i, v := range verbs {
				names[i] = v.Name()
			}
			if len(args) == 0 {
				return errdefs.New(errdefs.Invalid, "%s needs a verb: %s", name, strings.Join(names, ", "))
			}
			return errdefs.New(errdefs.Invalid, "%s %s: there is no such verb%s; use %s", name, args[0], DidYouMean(cmd, args[0]), strings.Join(names, ", "))
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.AddCommand(verbs...)
	return cmd
}

// DidYouMean asks whether one of the command's verbs with a name like that given
// was meant; "" when there is none.
func DidYouMean(cmd *cobra.Command, given string) string {
	similar := cmd.SuggestionsFor(given)
	if len(similar) == 0 {
		return ""
	}
	return " (did you mean " + strings.Join(similar, " or ") + "?)"
}

// NameOf is the command's name without the program's.
func NameOf(cmd *cobra.Command) string {
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
}

// Help prints a command's help with its exit codes.
func (a *App) Help(cmd *cobra.Command, _ []string) {
	w := cmd.OutOrStdout()
	text := cmd.Long
	if text == "" {
		text = cmd.Short + "."
	}
	fmt.Fprintf(w, "%s\n\n%s", text, cmd.UsageString())
	v, ok := a.verbs[cmd]
	if !ok {
		return
	}
	if v.Cancels {
		fmt.Fprintf(w, "\nCtrl-C:\n  cancels the operation and waits until it is undone; a second one leaves at once.\n")
	} else if v.Effect {
		fmt.Fprintf(w, "\nCtrl-C:\n  ends the wait; the operation goes on.\n")
	}
	fmt.Fprintf(w, "\nExit codes:\n  %s\n", strings.Join(v.Exits(), "\n  "))
}

// Exits lists the exit codes of the verb.
func (v Verb) Exits() []string {
	if v.PassesCode {
		return []string{
			"  0–255  the exit code of the command; 126 and 127 when it could not be run, 128+N when signal N ended it",
			"    125  holdpoint's own failure",
			"    130  interrupted before the command started",
		}
	}
	lines := append([]string{"  0  done"}, exitTable(append(everyVerb(), v.Kinds...))...)
	if v.PassesCodeOf {
		lines = append(lines,
			"with a COMMAND  that of the first machine where it is not 0",
			"125  holdpoint's own failure with a COMMAND",
		)
	}
	return lines
}

// Optional is the first of args, or "".
func Optional(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

// GlobalFlags gives the root command the flags of every verb.
func (a *App) GlobalFlags(root *cobra.Command) {
	flags := root.PersistentFlags()
	flags.StringVar(&a.home, "home", "", "folder with all state (default $HOLDPOINT_HOME, else the user's)")
	flags.BoolVar(&a.JSON, "json", false, "print one JSON object")
	flags.BoolVarP(&a.Quiet, "quiet", "q", false, "print names and ids only, and nothing on the side")
}

// VerbOf is what a command was made from; ok is false for a group.
func (a *App) VerbOf(cmd *cobra.Command) (v Verb, ok bool) {
	v, ok = a.verbs[cmd]
	return v, ok
}
