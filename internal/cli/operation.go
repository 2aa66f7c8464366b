package cli

import (
	"context"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

type operationListOptions struct {
	machine string
	all     bool
}

func newOperationList(a *app.App) *cobra.Command {
	var o operationListOptions
	cmd := a.Command(app.Verb{
		Use: "ls [flags]", Short: "List operations, newest first",
		Long: `List operations, newest first: the phase each is in or has ended in, and for one
that failed the kind of its error. "operation show" tells the error.`,
		Object: view.Operations{}, Kinds: []errdefs.Kind{errdefs.NotFound},
		Run: func(ctx context.Context, _ []string) error { return runOperationList(ctx, a, o) },
	})
	cmd.Flags().StringVar(&o.machine, "machine", "", "only those of this machine")
	cmd.Flags().BoolVarP(&o.all, "all", "a", false, "ended ones too")
	a.CompleteFlag(cmd, "machine", a.MachineNames)
	return cmd
}

func runOperationList(ctx context.Context, a *app.App, o operationListOptions) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Operations.List(ctx, connect.NewRequest(&holdpointv1.ListOperationsRequest{Machine: o.machine, All: o.all}))
		if err != nil {
			return err
		}
		operations := res.Msg.GetOperations()
		out := app.Output{Object: view.Operations{Header: view.NewHeader(), Operations: view.List(operations, view.OperationOf)}}
		rows := make([][]string, 0, len(operations))
		for _, op := range operations {
			out.Terse = append(out.Terse, op.GetId())
			rows = append(rows, []string{
				op.GetId(), op.GetVerb(), view.Dash(op.GetMachine()), view.StateOf(op.GetState()),
				view.Age(view.TimeOf(op.GetCreatedAt()), time.Now()), phaseOf(op),
			})
		}
		out.Human = func(w io.Writer) error {
			return view.Table(w, []string{"ID", "VERB", "MACHINE", "STATE", "BEGUN", "PHASE"}, rows)
		}
		return a.Print(out)
	})
}

// phaseOf is the phase an operation is in or ended in, and the kind of its failure.
func phaseOf(op *client.Operation) string {
	if op.GetState() == holdpointv1.OperationState_OPERATION_STATE_FAILED {
		return strings.TrimPrefix(op.GetPhase()+", ", ", ") + op.GetError().GetKind()
	}
	return view.Dash(op.GetPhase())
}

func newOperationShow(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "show OPERATION", Short: "Show an operation",
		Long:    `Show an operation by its id, a beginning of it, or "last" for the one begun last.`,
		MinArgs: 1, MaxArgs: 1,
		Object: view.OperationObject{}, Kinds: []errdefs.Kind{errdefs.NotFound}, Complete: app.First(a.AllOperationIDs),
		Run: func(ctx context.Context, args []string) error {
			return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
				op, err := findOperation(ctx, c, args[0])
				if err != nil {
					return err
				}
				return printOperation(a, op)
			})
		},
	})
}

// findOperation is the operation of the id; "last" is the one begun last.
func findOperation(ctx context.Context, c *client.Client, id string) (*client.Operation, error) {
	if id != "last" {
		res, err := c.Operations.Get(ctx, operationRequest(id))
		if err != nil {
			return nil, err
		}
		return res.Msg, nil
	}
	res, err := c.Operations.List(ctx, connect.NewRequest(&holdpointv1.ListOperationsRequest{All: true}))
	if err != nil {
		return nil, err
	}
	if len(res.Msg.GetOperations()) == 0 {
		return nil, errdefs.New(errdefs.NotFound, "operation last: none was begun yet in this home")
	}
	return res.Msg.GetOperations()[0], nil
}

func operationRequest(id string) *connect.Request[holdpointv1.GetOperationRequest] {
	return connect.NewRequest(&holdpointv1.GetOperationRequest{Operation: id})
}

func newOperationWait(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "wait OPERATION", Short: "Wait until an operation has ended",
		Long: `Wait until an operation has ended, show its progress on a terminal, and exit as
the verb that began it would have. Ctrl-C ends the wait only.`,
		MinArgs: 1, MaxArgs: 1, Object: view.OperationObject{}, Complete: app.First(a.OperationIDs),
		Kinds: app.MachineKinds(errdefs.Unsupported, errdefs.NoSpace),
		Run:   func(ctx context.Context, args []string) error { return runOperationWait(ctx, a, args[0]) },
	})
}

func runOperationWait(ctx context.Context, a *app.App, id string) error {
	return a.With(ctx, func(c *client.Client) error {
		admitted := make(chan *client.Operation, 1)
		op, err := a.Await(ctx, c, false, admitted, func(ctx context.Context, progress func(*client.Operation)) (*client.Operation, error) {
			var op *client.Operation
			err := c.Ask(ctx, func(ctx context.Context) (err error) {
				op, err = findOperation(ctx, c, id)
				return err
			})
			if err != nil {
				return nil, err
			}
			admitted <- op
			if client.Ended(op) {
				return op, client.Outcome(op)
			}
			return c.WaitOperation(ctx, op.GetId(), progress)
		})
		if err != nil {
			return err
		}
		return printOperation(a, op)
	})
}

func newOperationCancel(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "cancel OPERATION", Short: "End an operation and undo it",
		Long: `End an operation and wait until what it did is undone. One past its last undoable
step ends as done; the state printed says which it was. One that has ended before is
WRONG_STATE.`,
		MinArgs: 1, MaxArgs: 1, Object: view.OperationObject{}, Complete: app.First(a.OperationIDs),
		Kinds: []errdefs.Kind{errdefs.NotFound, errdefs.WrongState, errdefs.OutcomeUnknown, errdefs.Deadline},
		Run: func(ctx context.Context, args []string) error {
			return a.Once(ctx, func(ctx context.Context, c *client.Client) error {
				op, err := findOperation(ctx, c, args[0])
				if err != nil {
					return err
				}
				if client.Ended(op) {
					return errdefs.New(errdefs.WrongState, "operation cancel: %s (%s) has ended: %s", op.GetId(), op.GetVerb(), outcomeOf(op))
				}
				res, err := c.Operations.Cancel(ctx, operationRequest(op.GetId()))
				if err != nil {
					return err
				}
				return printOperation(a, res.Msg)
			})
		},
	})
}

// outcomeOf says how an operation ended.
func outcomeOf(op *client.Operation) string {
	if e := op.GetError(); e != nil {
		return view.StateOf(op.GetState()) + ", " + e.GetKind() + ": " + e.GetMessage()
	}
	return view.StateOf(op.GetState())
}

func printOperation(a *app.App, op *client.Operation) error {
	return a.Print(app.Output{
		Object: view.OperationObject{Header: view.NewHeader(), Operation: view.OperationOf(op)},
		Terse:  []string{op.GetId()},
		Human: func(w io.Writer) error {
			fields := [][2]string{
				{"operation", op.GetId()},
				{"verb", op.GetVerb()},
				{"machine", op.GetMachine()},
				{"state", view.StateOf(op.GetState())},
			}
			if !client.Ended(op) {
				fields = append(fields, [2]string{"phase", app.PhaseOf(op)})
			}
			fields = append(fields,
				[2]string{"begun", view.Age(view.TimeOf(op.GetCreatedAt()), time.Now())},
				[2]string{"request id", op.GetRequestId()},
			)
			if e := op.GetError(); e != nil {
				fields = append(fields, [2]string{"error", e.GetKind() + ": " + e.GetMessage()})
			}
			return view.Fields(w, fields)
		},
	})
}
