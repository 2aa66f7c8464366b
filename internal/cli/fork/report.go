package fork

import (
	"fmt"
	"io"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/guest"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// report is what is told of a fork: begun when the machines are there, ended
// when their commands, if any, have.
type report struct {
	app      *app.App
	op       *client.Operation
	children []child
	// argv is the command in each machine; nil for none.
	argv []string
}

// child is one machine, or why there is none, and the command in it.
type child struct {
	fork *holdpointv1.ForkResult
	// ran says that a command was tried; result and err are what became of it.
	ran    bool
	result guest.Result
	err    error
	// stdout and stderr are kept with --json only.
	stdout, stderr *guest.Kept
}

// begin tells of what was made, and what not.
func (r *report) begin() {
	r.app.Note(r.op.GetResult().GetNotes())
	if p := r.op.GetResult().GetCheckpoint().GetCheckpoint(); p != nil {
		r.app.Say(fmt.Sprintf("made checkpoint %s of %s first; it goes on", p.GetId(), p.GetMachine()))
	}
	for _, c := range r.children {
		if e := c.fork.GetError(); e != nil {
			r.complain(c, e.GetMessage())
		}
	}
}

// complain is for failures, which are told also with --quiet.
func (r *report) complain(c child, message string) {
	fmt.Fprintf(r.app.Config.Stderr, "holdpoint: %s\n", fail(c.fork.GetName(), message))
}

// end prints the rest and gives the exit code.
func (r *report) end() error {
	o := app.Output{Object: r.object()}
	for _, c := range r.children {
		switch {
		case c.err != nil:
			r.complain(c, c.err.Error())
		case c.result.Reason != "":
			r.complain(c, c.result.Reason)
		case c.result.Code != 0:
			r.app.Say(fail(c.fork.GetName(), fmt.Sprintf("exit code %d", c.result.Code)))
		}
		if c.fork.GetError() == nil {
			o.Terse = append(o.Terse, c.fork.GetName())
		}
	}
	detached := r.detached()
	if r.argv == nil || detached || r.app.JSON {
		o.Human = func(w io.Writer) error { return r.table(w, detached) }
		if err := r.app.Print(o); err != nil {
			return err
		}
	}
	if code := r.code(); code != 0 {
		return app.Exit{Code: code}
	}
	return nil
}

func (r *report) detached() bool {
	for _, c := range r.children {
		if c.result.Left {
			return true
		}
	}
	return false
}

func (r *report) table(w io.Writer, commands bool) error {
	heads := []string{"NAME", "ID", "STATE", "READY"}
	if commands {
		heads = append(heads, "COMMAND")
	}
	rows := make([][]string, 0, len(r.children))
	for _, c := range r.children {
		m := c.fork.GetMachine()
		row := []string{c.fork.GetName(), view.Short(m.GetId()), m.GetState(), view.Millis(c.fork.GetReadyMs())}
		if c.fork.GetError() != nil {
			row = []string{c.fork.GetName(), "-", "not made", "-"}
		}
		if commands {
			row = append(row, view.Dash(c.result.CommandID))
		}
		rows = append(rows, row)
	}
	return view.Table(w, heads, rows)
}

func (r *report) object() view.Forked {
	result := r.op.GetResult()
	o := view.Forked{
		Header: view.NewHeader(), Checkpoint: view.CheckpointOf(result.GetCheckpoint().GetCheckpoint()),
		Machines:  make([]view.ForkedMachine, 0, len(r.children)),
		Operation: r.op.GetId(), Notes: view.Notes(result.GetNotes()),
	}
	for _, c := range r.children {
		o.Machines = append(o.Machines, c.view())
	}
	return o
}

func (c child) view() view.ForkedMachine {
	v := view.ForkedOf(c.fork)
	if !c.ran {
		return v
	}
	if c.stdout != nil {
		v.Stdout, v.Stderr = c.stdout.String(), c.stderr.String()
		v.Truncated = c.stdout.Full() || c.stderr.Full()
	}
	if c.result.CommandID != "" {
		v.Command = &view.Command{ID: c.result.CommandID, PID: c.result.PID}
	}
	v.Detached = c.result.Left
	switch {
	case c.err != nil:
		v.Error = &view.Error{Kind: string(client.KindOf(c.err)), Message: view.Line(c.err.Error())}
	case !c.result.Left:
		v.ExitCode = &c.result.Code
		v.Error = view.NotStarted(c.result.Code, c.result.Reason)
	}
	return v
}

// code is the exit code: that of the first machine, by number, with one.
func (r *report) code() int {
	for _, c := range r.children {
		kind := errdefs.Kind(c.fork.GetError().GetKind())
		if c.err != nil {
			kind = client.KindOf(c.err)
		}
		switch {
		case c.fork.GetError() == nil && c.err == nil:
			if c.result.Code != 0 {
				return int(c.result.Code)
			}
		case r.argv != nil && kind != errdefs.Interrupted:
			return app.ExitOwn
		default:
			return app.ExitCode(kind)
		}
	}
	return 0
}
