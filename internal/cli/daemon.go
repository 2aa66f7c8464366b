package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/launch"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// daemonVerbs are those of "daemon"; run is only where a daemon can run.
func daemonVerbs(a *app.App) []*cobra.Command {
	verbs := []*cobra.Command{newDaemonStart(a), newDaemonStop(a), newDaemonStatus(a)}
	if a.Config.RunDaemon != nil {
		verbs = append(verbs, newDaemonRun(a))
	}
	return verbs
}

func newDaemonStart(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "start", Short: "Start the daemon if it does not run",
		Long: `Start the daemon if it does not run, and replace one of another build. Every other
verb does this by itself.`,
		Object: view.DaemonStatus{}, Kinds: []errdefs.Kind{errdefs.Unsupported, errdefs.Storage, errdefs.Deadline, errdefs.Denied},
		Run: func(ctx context.Context, _ []string) error {
			return withLauncher(ctx, a, func(ctx context.Context, l *launch.Launcher) error {
				status, err := l.Start(ctx)
				if err != nil {
					return err
				}
				return printStatus(a, status, false)
			})
		},
	})
}

// withLauncher runs f with the launcher, until we are asked to leave.
func withLauncher(ctx context.Context, a *app.App, f func(context.Context, *launch.Launcher) error) error {
	ctx, stop := app.Interruptible(ctx)
	defer stop()
	l, err := a.Launcher()
	if err != nil {
		return err
	}
	return f(ctx, l)
}

func newDaemonStop(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "stop", Short: "Stop the daemon; machines run on",
		Object: view.DaemonStopped{}, Kinds: []errdefs.Kind{errdefs.Deadline, errdefs.Denied},
		Run: func(ctx context.Context, _ []string) error {
			return withLauncher(ctx, a, func(ctx context.Context, l *launch.Launcher) error { return runDaemonStop(ctx, a, l) })
		},
	})
}

func runDaemonStop(ctx context.Context, a *app.App, l *launch.Launcher) error {
	h, err := a.OpenHome()
	if err != nil {
		return err
	}
	pid, err := l.Stop(ctx)
	if err != nil {
		return err
	}
	if pid == 0 {
		a.Say("no daemon runs for home " + h.Dir())
	}
	return a.Print(app.Output{Object: view.DaemonStopped{Header: view.NewHeader(), PID: pid, Home: h.Dir()}})
}

func newDaemonStatus(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "status", Short: "Show the daemon; never starts one",
		Object: view.DaemonStatus{}, Kinds: []errdefs.Kind{errdefs.NotFound, errdefs.Denied},
		Run: func(ctx context.Context, _ []string) error {
			return withLauncher(ctx, a, func(ctx context.Context, l *launch.Launcher) error { return runDaemonStatus(ctx, a, l) })
		},
	})
}

func runDaemonStatus(ctx context.Context, a *app.App, l *launch.Launcher) error {
	c, status, err := l.Find(ctx)
	if client.Unreachable(err) {
		h, openErr := a.OpenHome()
		if openErr != nil {
			return openErr
		}
		return errdefs.New(errdefs.NotFound, "no daemon runs for home %s; `holdpoint daemon start` starts one", h.Dir())
	}
	if err != nil {
		return err
	}
	c.Close()
	return printStatus(a, status, true)
}

func printStatus(a *app.App, s *launch.Status, full bool) error {
	o := app.Output{
		Object: view.DaemonStatus{
			Header: view.NewHeader(), PID: s.GetPid(), Build: s.GetBuild(), Home: s.GetHome(), Proxy: s.GetProxy(),
			Machines: s.GetMachines(), Running: s.GetRunning(), StartedAt: view.Stamp(s.GetStartedAt()),
		},
		Terse: []string{fmt.Sprint(s.GetPid())},
	}
	if full {
		o.Human = func(w io.Writer) error {
			return view.Fields(w, [][2]string{
				{"pid", fmt.Sprint(s.GetPid())},
				{"build", s.GetBuild()},
				{"home", s.GetHome()},
				{"proxy", s.GetProxy()},
				{"machines", fmt.Sprintf("%d, %d running", s.GetMachines(), s.GetRunning())},
				{"started", view.Age(view.TimeOf(s.GetStartedAt()), time.Now())},
			})
		}
	}
	return a.Print(o)
}

func newDaemonRun(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "run", Short: "Run the daemon here, until it is stopped",
		Long: `Run the daemon in this process, until SIGTERM, Ctrl-C or "holdpoint daemon stop".
For service managers; it tells systemd when it listens.`,
		Kinds: []errdefs.Kind{errdefs.Conflict, errdefs.Unsupported, errdefs.Storage, errdefs.Denied},
		Run:   func(ctx context.Context, _ []string) error { return runDaemonRun(ctx, a) },
	})
}

func runDaemonRun(ctx context.Context, a *app.App) error {
	announcer := launch.NewAnnouncer()
	err := runDaemon(ctx, a, announcer)
	if errors.Is(err, context.Canceled) {
		return nil // it was asked to end
	}
	if err != nil {
		announcer.Failed(err)
	}
	return err
}

func runDaemon(ctx context.Context, a *app.App, announcer *launch.Announcer) error {
	ctx, stop := app.Interruptible(ctx)
	defer stop()
	h, err := a.OpenHome()
	if err != nil {
		return err
	}
	executable, err := a.Executable()
	if err != nil {
		return err
	}
	return a.Config.RunDaemon(ctx, DaemonRun{
		Home: h, Build: launch.Build(a.Config.Version), Executable: executable, Log: a.Config.Stderr,
		Ready: func() {
			announcer.Ready()
			launch.NotifySystemd(func(err error) { a.Say("tell systemd: " + err.Error()) })
		},
	})
}

// newMonitor is the hidden verb that looks after one run of a machine. Its
// arguments are between the daemon and the monitor.
func newMonitor(a *app.App) *cobra.Command {
	cmd := a.Command(app.Verb{
		Use: "monitor", Short: "Look after one run of a machine", Hidden: true, MaxArgs: -1,
		Run: func(ctx context.Context, args []string) error { return a.Config.RunMonitor(ctx, args) },
	})
	cmd.DisableFlagParsing = true
	return cmd
}
