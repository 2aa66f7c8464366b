package history

import (
	"context"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/shellwords"
)

type checkpointCreateOptions struct {
	kind        string
	mode        string
	name        string
	message     string
	stopRunning bool
	allowCrash  bool
	freezeLimit time.Duration
	allowHooks  bool
}

const checkpointCreateText = `Make a checkpoint of a machine. It is listed once it is safe on disk.

--kind full (the default) keeps disk, memory and CPU of a running machine, which
goes on: it stands still for some milliseconds. Where that cannot be done it is
refused, and says why; a full checkpoint never becomes another kind. Only what
changed since the checkpoint the machine continues from is stored. Whether it can be
restored is tried in the background, newest first, once the host has little to do;
"checkpoint verify" does it at once.

--kind disk keeps the disk:
  --mode frozen    (the default where the machine runs) while its file systems
                   refuse writes, for some milliseconds; it goes on, and so does
                   all that runs in it. They thaw by themselves after
                   --freeze-limit, whatever happens; the checkpoint then fails.
                   Executable files in /etc/holdpoint/hooks.d of the machine are
                   run as root before it, with the word freeze, and after it, with
                   the word thaw, for 10 s at most; one that fails keeps the
                   checkpoint from being made, or is noted with
                   --allow-hook-failure.
  --mode stopped   (the default where it is stopped) after a clean shutdown; the
                   machine is booted again, and a stopped one stays so. Commands that run in it end: this is
                   asked on a terminal, and refused without one unless
                   --stop-running is given.

Of a machine with a raw disk there is --kind disk --mode stopped only: its disk is
copied while it is stopped, by reflink where the file system can, else its data.

Downtime is how long the machine stood still, "answers again" and "durable" count
from the request: until it answered, and until the checkpoint was safe.`

// NewCheckpointCreate is the verb `checkpoint create`.
func NewCheckpointCreate(a *app.App) *cobra.Command {
	var o checkpointCreateOptions
	cmd := a.Command(app.Verb{
		Use: "create MACHINE [flags]", Short: "Make a checkpoint of a machine",
		Long: checkpointCreateText,
		Example: `  holdpoint checkpoint create web -m "tests green"
  holdpoint checkpoint create web --kind disk
  holdpoint checkpoint create web --kind disk --mode stopped --name before-agent`,
		MinArgs: 1, MaxArgs: 1, Effect: true, Cancels: true, Object: view.CheckpointCreated{}, Complete: app.First(a.MachineNames),
		Kinds: app.MachineKinds(errdefs.AlreadyExists, errdefs.Unsupported, errdefs.Incompatible, errdefs.NoSpace),
		Run: func(ctx context.Context, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			return runCheckpointCreate(ctx, a, args[0], o)
		},
	})
	f := cmd.Flags()
	f.StringVar(&o.kind, "kind", "full", "full or disk")
	f.StringVar(&o.mode, "mode", "", "of a disk checkpoint: frozen or stopped (default frozen, of a stopped machine stopped)")
	f.DurationVar(&o.freezeLimit, "freeze-limit", 0, "of --mode frozen: how long the file systems may be frozen, up to 10s (default 2s)")
	f.BoolVar(&o.allowHooks, "allow-hook-failure", false, "of --mode frozen: make the checkpoint although a hook in the machine fails")
	f.StringVar(&o.name, "name", "", "name of the checkpoint")
	f.StringVarP(&o.message, "message", "m", "", "what it is for")
	f.BoolVar(&o.stopRunning, "stop-running", false, "end the commands that run, without asking")
	f.BoolVar(&o.allowCrash, "allow-crash", false, "end a machine that does not shut down in time, and mark the checkpoint crash")
	a.CompleteFlag(cmd, "kind", app.Words("full", "disk"))
	a.CompleteFlag(cmd, "mode", app.Words("frozen", "stopped"))
	return cmd
}

func (o *checkpointCreateOptions) check() error {
	kind, err := checkpoint.ParseKind(o.kind)
	if err != nil {
		return err
	}
	switch {
	case kind == checkpoint.Full && o.mode != "":
		return errdefs.New(errdefs.Invalid, "checkpoint mode %q: only a disk checkpoint has one; add --kind disk", o.mode)
	case kind == checkpoint.Full && (o.stopRunning || o.allowCrash):
		return errdefs.New(errdefs.Invalid, "checkpoint create: a full checkpoint ends nothing; --stop-running and --allow-crash go with --kind disk --mode stopped")
	case kind == checkpoint.Full && (o.freezeLimit != 0 || o.allowHooks):
		return errdefs.New(errdefs.Invalid, "checkpoint create: a full checkpoint freezes no file systems; --freeze-limit and --allow-hook-failure go with --kind disk")
	case o.mode != "" && o.mode != string(checkpoint.Frozen) && o.mode != string(checkpoint.Stopped):
		return errdefs.New(errdefs.Invalid, "checkpoint mode %q: use frozen or stopped", o.mode)
	case o.freezeLimit != 0 && o.freezeLimit < time.Millisecond:
		return errdefs.New(errdefs.Invalid, "--freeze-limit %s: use 1ms to 10s", o.freezeLimit)
	}
	return nil
}

func runCheckpointCreate(ctx context.Context, a *app.App, machine string, o checkpointCreateOptions) error {
	return a.With(ctx, func(c *client.Client) error {
		if o.mode == string(checkpoint.Stopped) && !o.stopRunning && a.Interactive() {
			var err error
			if o.stopRunning, err = mayStop(ctx, a, c, machine); err != nil {
				return err
			}
		}
		op, err := app.Operate(ctx, a, c, true, c.Checkpoints.Create, &holdpointv1.CreateCheckpointRequest{
			RequestId: a.RequestID(), Machine: machine, Kind: o.kind, Mode: o.mode, Name: o.name, Message: o.message,
			StopRunning: o.stopRunning, AllowCrash: o.allowCrash,
			FreezeLimitMillis: o.freezeLimit.Milliseconds(), AllowHookFailure: o.allowHooks,
		})
		if err != nil {
			return err
		}
		return printCheckpoint(a, op)
	})
}

// mayStop asks whether the commands that run in the machine may end; without
// any, nothing is asked and nothing may.
func mayStop(ctx context.Context, a *app.App, c *client.Client, machine string) (bool, error) {
	res, err := c.Guest.ListCommands(ctx, connect.NewRequest(&holdpointv1.ListGuestCommandsRequest{Machine: machine}))
	if err != nil {
		// The daemon checks again, and has the say; a stopped machine runs none.
		return false, nil
	}
	running := 0
	for _, command := range res.Msg.GetCommands() {
		if command.GetRunning() {
			running++
			fmt.Fprintf(a.Config.Stderr, "  %s\n", view.Line(shellwords.Name(command.GetArgv())))
		}
	}
	if running == 0 {
		return false, nil
	}
	yes, err := a.Ask(fmt.Sprintf("A stopped checkpoint ends %s in %s. Go on?", view.Count(running, "running command"), machine))
	if err != nil {
		return false, err
	}
	if !yes {
		return false, errdefs.New(errdefs.Interrupted, "checkpoint create %s: not done; nothing was changed", machine)
	}
	return true, nil
}

func printCheckpoint(a *app.App, op *client.Operation) error {
	r, notes := op.GetResult().GetCheckpoint(), op.GetResult().GetNotes()
	p := r.GetCheckpoint()
	a.Note(notes)
	return a.Print(app.Output{
		Object: view.CheckpointCreated{
			Header: view.NewHeader(), Checkpoint: view.CheckpointOf(p),
			TimesKnown: timesKnown(r), DowntimeMS: r.GetDowntimeMs(), ReturnMS: r.GetReturnMs(), DurableMS: r.GetDurableMs(),
			StopMS: r.GetStopMs(), CopyMS: r.GetCopyMs(), BootMS: r.GetBootMs(), Phases: view.PhasesOf(r), Freeze: view.FreezeOf(r),
			MemoryBytes: r.GetMemoryBytes(), DiskBytes: r.GetDiskBytes(), DiskCopy: r.GetDiskCopy(),
			RestoreCommand: restoreCommand(p), Operation: op.GetId(), Notes: view.Notes(notes),
		},
		Terse: []string{p.GetId()},
		Human: func(w io.Writer) error {
			return view.Fields(w, [][2]string{
				{"checkpoint", p.GetId()},
				{"name", p.GetName()},
				{"kind", view.KindOf(p)},
				{"copied while it ran", view.Precopied(r)},
				{"downtime", downtime(r)},
				{"hooks failed", p.GetHookFailure()},
				{"answers again", answers(r)},
				{"durable", durable(r)},
				{"stored", stored(r.GetDiskBytes(), r.GetMemoryBytes())},
				{"disk copied", copied(r)},
				{"restore with", restoreCommand(p)},
			})
		},
	})
}

// timesKnown reports whether it was measured how long it took: not by a daemon
// that ended meanwhile.
func timesKnown(r *holdpointv1.CheckpointResult) bool { return r.GetDurableMs() > 0 }

// durable says when the checkpoint was safe.
func durable(r *holdpointv1.CheckpointResult) string {
	if !timesKnown(r) {
		return "yes; when is not known"
	}
	return "after " + view.Millis(r.GetDurableMs())
}

// copied says how a raw disk was copied; "" for any other disk.
func copied(r *holdpointv1.CheckpointResult) string {
	switch r.GetDiskCopy() {
	case "reflink":
		return "by reflink, which shares its blocks"
	case "data":
		return "by its data, which the file system cannot share"
	}
	return ""
}

// stood reports whether the machine was stopped before, so that nothing of it
// was stopped or booted.
func stood(r *holdpointv1.CheckpointResult) bool {
	return r.GetCheckpoint().GetConsistency() == string(checkpoint.Stopped) && r.GetBootMs() == 0
}

// answers says when the machine answered again; "" if it was stopped anyway, or
// did not answer.
func answers(r *holdpointv1.CheckpointResult) string {
	if stood(r) || r.GetReturnMs() == 0 {
		return ""
	}
	return "after " + view.Millis(r.GetReturnMs())
}

// downtime says how long the machine stood still, with the parts it has.
func downtime(r *holdpointv1.CheckpointResult) string {
	if !timesKnown(r) {
		return "not known: the daemon ended meanwhile"
	}
	if stood(r) {
		return "none: the machine was stopped, and still is"
	}
	if r.GetCheckpoint().GetKind() == string(checkpoint.Full) {
		return view.FullDowntime(r)
	}
	text := view.Millis(r.GetDowntimeMs())
	if r.GetCheckpoint().GetConsistency() == string(checkpoint.Frozen) {
		return fmt.Sprintf("%s for writes (freeze %s, switch %s); none for all else", text, view.Millis(r.GetFreezeMs()), view.Millis(r.GetSwitchMs()))
	}
	if r.GetStopMs()+r.GetCopyMs()+r.GetBootMs() == 0 {
		return text
	}
	return fmt.Sprintf("%s (stop %s, copy %s, boot %s)", text,
		view.Millis(r.GetStopMs()), view.Millis(r.GetCopyMs()), view.Millis(r.GetBootMs()))
}
