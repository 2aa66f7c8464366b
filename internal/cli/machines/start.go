package machines

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

// StartedAll is what start --all prints.
type StartedAll struct {
	view.Header
	Machines []Started `json:"machines"`
}

// Started is one machine of start --all.
type Started struct {
	Name  string      `json:"name"`
	ID    string      `json:"id"`
	State string      `json:"state"`
	Error *view.Error `json:"error"`
}

// NewStart is the verb `start`.
func NewStart(a *app.App) *cobra.Command {
	var all bool
	cmd := a.Command(app.Verb{
		Use: "start MACHINE | --all", Short: "Boot a stopped machine",
		Long: `Boot a stopped machine. With --all boot every one that is stopped, one after the
other; what fails is told, and the rest is booted all the same. Suspended machines
stay so. The exit code is that of the first failure, and --json then prints
"machines", each with "name", "id", "state" and "error", which is null where there
was none.`,
		MaxArgs: 1, Effect: true,
		Object: view.MachineDone{}, Complete: app.First(a.MachineNames),
		Kinds: app.MachineKinds(errdefs.Unsupported, errdefs.Incompatible, errdefs.NoSpace),
		Run: func(ctx context.Context, args []string) error {
			switch {
			case all && len(args) == 0:
				return runStartAll(ctx, a)
			case all || len(args) == 0:
				return errdefs.New(errdefs.Invalid, "start: give a machine, or --all and none")
			}
			req := &holdpointv1.StartMachineRequest{RequestId: a.RequestID(), Machine: args[0]}
			return operateMachine(ctx, a, func(c *client.Client) app.Admission[holdpointv1.StartMachineRequest] { return c.Machines.Start }, req)
		},
	})
	cmd.Flags().BoolVar(&all, "all", false, "every machine that is stopped")
	return cmd
}

func runStartAll(ctx context.Context, a *app.App) error {
	o := StartedAll{Header: view.NewHeader(), Machines: []Started{}}
	var terse []string
	code := 0
	err := a.With(ctx, func(c *client.Client) error {
		list, err := c.Machines.List(ctx, connect.NewRequest(&holdpointv1.ListMachinesRequest{}))
		if err != nil {
			return err
		}
		id := a.RequestID()
		for _, m := range list.Msg.GetMachines() {
			if m.GetState() != "stopped" {
				continue
			}
			done := Started{Name: m.GetName(), ID: m.GetId(), State: m.GetState()}
			req := &holdpointv1.StartMachineRequest{RequestId: id + "/" + m.GetId(), Machine: m.GetId()}
			op, err := app.Operate(ctx, a, c, false, c.Machines.Start, req)
			if err == nil {
				a.Note(op.GetResult().GetNotes())
				done.State = op.GetResult().GetMachine().GetState()
				terse = append(terse, done.Name)
			} else {
				kind := client.KindOf(err)
				if kind == errdefs.Interrupted {
					return err
				}
				if code == 0 {
					code = app.ExitCode(kind)
				}
				done.Error = &view.Error{Kind: string(kind), Message: view.Line(err.Error())}
				fmt.Fprintf(a.Config.Stderr, "holdpoint: %s\n", done.Error.Message)
			}
			o.Machines = append(o.Machines, done)
		}
		return nil
	})
	if err != nil {
		return err
	}
	err = a.Print(app.Output{Object: o, Terse: terse, Human: func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "%s started\n", view.Count(len(terse), "machine"))
		return err
	}})
	if err == nil && code != 0 {
		return app.Exit{Code: code}
	}
	return err
}
