package inside

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/guest"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/shellwords"
)

// maxJSONOutput is how much of each of a command's outputs --json carries, in
// bytes.
const maxJSONOutput = 16 << 20

type execOptions struct {
	interactive bool
	tty         bool
	env         []string
	dir         string
	user        string
	detach      bool
}

// NewExec is the verb `exec`.
func NewExec(a *app.App) *cobra.Command {
	var o execOptions
	var cmd *cobra.Command
	cmd = a.Command(app.Verb{
		Use: "exec MACHINE [flags] -- COMMAND [ARG...]", Short: "Run a command in a machine",
		Long: `Run a command in a machine, with its output here and its exit code. Signals are
passed on to it; at the third interrupt or termination in a row it is hung up and
waited for no longer. One that the guest has not begun in 60 s is DEADLINE. At 256
commands of a machine at once, those attached to included, one more is MACHINE_BUSY.
Flags come before --, the command after it.

With --detach the command goes on by itself and its id is printed, for
"holdpoint attach". Its input is empty then, unless --interactive or --tty keeps it
open for "holdpoint attach --interactive"; nothing is read from here.

With --json, "error" says why a command could not be started (exit code 126 or
127); it is null when the command ran, however it ended.`,
		Example: `  holdpoint exec web -- nginx -t
  tar c src | holdpoint exec web -i -- tar x -C /srv
  holdpoint exec web -it -- bash
  holdpoint exec web --detach -t -- top`,
		MinArgs: 2, MaxArgs: -1, PassesCode: true, Object: view.Executed{}, Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error {
			if cmd.ArgsLenAtDash() != 1 {
				return errdefs.New(errdefs.Invalid, "exec in %s: write -- before the command, and flags of exec before it: `holdpoint exec %s -- %s`",
					args[0], args[0], shellwords.Quote(args[1:]...))
			}
			return runExec(ctx, a, args[0], args[1:], o)
		},
	})
	f := cmd.Flags()
	f.BoolVarP(&o.interactive, "interactive", "i", false, "pass standard input on")
	f.BoolVarP(&o.tty, "tty", "t", false, "give the command a terminal")
	f.StringArrayVarP(&o.env, "env", "e", nil, "set KEY=VALUE; KEY alone takes the value from here; may be given again")
	f.StringVarP(&o.dir, "workdir", "w", "", "folder to run it in (default the image's, or the user's home)")
	f.StringVarP(&o.user, "user", "u", "", "user, or user:group, to run it as (default the image's, or root)")
	f.BoolVar(&o.detach, "detach", false, "let it go on by itself and print its id")
	return cmd
}

func runExec(ctx context.Context, a *app.App, machine string, argv []string, o execOptions) error {
	env, err := environment(o.env)
	if err != nil {
		return err
	}
	start := &agentv1.ExecStart{Argv: argv, Env: env, Cwd: o.dir, User: o.user, Tty: o.tty, Detach: o.detach}
	if o.tty && a.JSON && !o.detach {
		return errdefs.New(errdefs.Invalid, "exec in %s: --tty and --json exclude each other", machine)
	}
	e := &guest.Exec{Verb: "exec", Machine: machine, Start: start, KeepInput: o.detach && (o.interactive || o.tty)}
	return execute(ctx, a, e, o.interactive && !o.detach)
}

// environment completes KEY to KEY=VALUE.
func environment(given []string) ([]string, error) {
	env := make([]string, 0, len(given))
	for _, e := range given {
		key, _, hasValue := strings.Cut(e, "=")
		if key == "" {
			return nil, errdefs.New(errdefs.Invalid, "environment %q: write KEY=VALUE", e)
		}
		if !hasValue {
			value, set := os.LookupEnv(key)
			if !set {
				continue
			}
			e = key + "=" + value
			if err := app.CheckUTF8("environment: the value here of "+key+",", value); err != nil {
				return nil, err
			}
		}
		env = append(env, e)
	}
	return env, nil
}

// execute runs e with this process's streams and ends as the command does.
func execute(ctx context.Context, a *app.App, e *guest.Exec, withInput bool) error {
	stdout, stderr := guest.Kept{Limit: maxJSONOutput}, guest.Kept{Limit: maxJSONOutput}
	e.Stdout, e.Stderr = a.Config.Stdout, a.Config.Stderr
	if a.JSON {
		e.Stdout, e.Stderr = &stdout, &stderr
	}
	if withInput {
		e.Stdin = a.Config.Stdin
	}
	result, err := atTerminal(ctx, a, e)
	if err != nil {
		return named(e.Verb, err)
	}
	return printExecuted(a, e, result, &stdout, &stderr)
}

// atTerminal runs e with the terminal prepared for it.
func atTerminal(ctx context.Context, a *app.App, e *guest.Exec) (result guest.Result, err error) {
	e.Waiting = func(why string) { a.Say("waiting: " + why) }
	err = a.With(ctx, func(c *client.Client) error {
		restore, err := takeTerminal(a, e)
		if err != nil {
			return err
		}
		defer restore()
		result, err = e.Run(ctx, c)
		return err
	})
	return result, err
}

// takeTerminal prepares the terminal and the signals for a command, until
// restore.
func takeTerminal(a *app.App, e *guest.Exec) (restore func(), err error) {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, terminal.Forwarded()...)
	e.Signals = signals
	tty := e.Start.GetTty() || e.TTYWanted
	in, isFile := a.Config.Stdin.(*os.File)
	if !tty || !isFile || !terminal.Is(in) || e.Stdin == nil {
		return func() { signal.Stop(signals) }, nil
	}
	e.TTY = in
	size := guest.SizeOf(in)
	if e.Start != nil {
		e.Start.Size = size
		if name := os.Getenv("TERM"); name != "" && utf8.ValidString(name) {
			e.Start.Env = append([]string{"TERM=" + name}, e.Start.Env...)
		}
	} else if e.Attach != nil {
		e.Attach.Size = size
	}
	raw, err := terminal.Raw(in)
	if err != nil {
		signal.Stop(signals)
		return nil, err
	}
	return func() {
		raw()
		signal.Stop(signals)
	}, nil
}

func printExecuted(a *app.App, e *guest.Exec, r guest.Result, stdout, stderr *guest.Kept) error {
	detached := e.Start.GetDetach() && r.Left
	switch {
	case a.JSON:
		err := a.PrintJSON(view.Executed{
			Header: view.NewHeader(), Command: view.Command{ID: r.CommandID, PID: r.PID}, Detached: r.Left,
			ExitCode: r.Code, Error: view.NotStarted(r.Code, r.Reason), Stdout: stdout.String(), Stderr: stderr.String(), Truncated: stdout.Full() || stderr.Full(),
		})
		if err != nil {
			return err
		}
	case detached:
		if _, err := fmt.Fprintln(a.Config.Stdout, r.CommandID); err != nil {
			return err
		}
	case r.Left:
		a.Say("left; the command goes on: `holdpoint attach " + e.Machine + " " + e.Attach.GetCommandId() + "`")
	}
	if r.Reason != "" {
		fmt.Fprintf(a.Config.Stderr, "holdpoint: %s in %s: %s\n", e.Verb, e.Machine, view.Line(r.Reason))
	}
	if r.DroppedBytes > 0 {
		a.Say(fmt.Sprintf("%s of older output were not kept", view.Size(int64(r.DroppedBytes))))
	}
	if r.Code != 0 {
		return app.Exit{Code: int(r.Code)}
	}
	return nil
}

// named gives the daemon's refusal of an exec the name of the verb that the
// user gave.
func named(verb string, err error) error {
	if text, found := strings.CutPrefix(err.Error(), "exec: "); found && verb != "exec" {
		return errdefs.New(client.KindOf(err), "%s: %s", verb, text)
	}
	return err
}
