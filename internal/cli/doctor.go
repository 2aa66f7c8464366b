package cli

import (
	"context"
	"fmt"
	"io"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func newDoctor(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "doctor", Short: "Say what works on this host, and the fix for the rest",
		Long: `Say what works on this host, and the fix for the rest. "degraded" works with a
loss that is named; with anything "failed" the exit code is 6.`,
		Object: view.Doctor{}, Kinds: []errdefs.Kind{errdefs.Unsupported},
		Run: func(ctx context.Context, _ []string) error { return runDoctor(ctx, a) },
	})
}

func runDoctor(ctx context.Context, a *app.App) error {
	var checks []*holdpointv1.DoctorCheck
	err := a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Daemon.Doctor(ctx, connect.NewRequest(&holdpointv1.DoctorRequest{}))
		if err != nil {
			return err
		}
		checks = res.Msg.GetChecks()
		return nil
	})
	if err != nil {
		return err
	}
	failed, names := 0, []string(nil)
	for _, check := range checks {
		if check.GetState() == "failed" {
			failed++
			names = append(names, check.GetName())
		}
	}
	if err := a.Print(app.Output{
		Object: view.Doctor{Header: view.NewHeader(), Checks: view.List(checks, view.CheckOf)},
		Terse:  names,
		Human:  func(w io.Writer) error { return printChecks(w, checks) },
	}); err != nil {
		return err
	}
	if failed > 0 {
		return app.Exit{Code: app.ExitCode(errdefs.Unsupported)}
	}
	return nil
}

func printChecks(w io.Writer, checks []*holdpointv1.DoctorCheck) error {
	rows := make([][]string, 0, len(checks))
	for _, c := range checks {
		rows = append(rows, []string{c.GetState(), c.GetName(), c.GetDetail()})
	}
	if err := view.Table(w, []string{"STATE", "CHECK", "FOUND"}, rows); err != nil {
		return err
	}
	for _, c := range checks {
		if c.GetFix() == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "\n%s: %s\n", c.GetName(), view.Line(c.GetFix())); err != nil {
			return err
		}
	}
	return nil
}
