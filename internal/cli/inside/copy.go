package inside

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/guest"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/tarstream"
)

// NewCopy is the verb `cp`.
func NewCopy(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "cp SOURCE DESTINATION", Short: "Copy files between this host and a machine",
		Long: `Copy a file or a folder between this host and a machine; one of both is written
MACHINE:PATH. Into a folder that is there it is copied under its own name, else it
becomes DESTINATION; of FOLDER/. only the content is copied. A host path with a
colon needs ./ before it, and . after the colon is the home folder there.

Kept: modes, times, holes, symbolic and hard links. SOURCE itself may be a symbolic
link, which is followed; links inside of it are copied as links. Not kept: owners
(files become root's in the machine, yours here), the set-user-ID and set-group-ID
bits, extended attributes. A device, pipe or socket as SOURCE is INVALID. Inside a
folder sockets are left out; devices and pipes are made in a machine, and left out,
which is said, on this host. Files without a size that have content, as in /proc,
are copied as they are at that moment, up to 16 MiB.

As SOURCE - is a tar on standard input, which is unpacked below the folder
MACHINE:PATH; the folder is made if it is not there. As DESTINATION - writes a tar to
standard output, in which names are as copied and holes are zeros. The same is kept
and left out as above, but that such a tar tells whose files were. Either is refused
on a terminal.

"files" in the output counts files, folders and links.`,
		Example: `  holdpoint cp site web:/srv/www
  holdpoint cp web:/var/log/nginx/error.log .
  git archive HEAD | holdpoint cp - web:/srv/app
  holdpoint cp web:/etc - | tar t`,
		MinArgs: 2, MaxArgs: 2, HostArgs: true, Object: view.Copied{},
		Kinds: []errdefs.Kind{
			errdefs.NotFound, errdefs.MachineBusy, errdefs.WrongState, errdefs.OutcomeUnknown, errdefs.NoSpace,
			errdefs.Storage, errdefs.Denied,
		},
		Complete: completeCopy(a),
		Run:      func(ctx context.Context, args []string) error { return runCopy(ctx, a, args[0], args[1]) },
	})
}

// place is one side of a copy.
type place struct {
	// machine is empty for the host.
	machine, path string
}

// placeOf reads MACHINE:PATH or a host path. Names of machines have neither
// slashes nor upper case, so that ./a:b and C:\ are host paths.
func placeOf(arg string) place {
	name, path, found := strings.Cut(arg, ":")
	if !found || name == "" || strings.ContainsFunc(name, notInName) {
		return place{path: arg}
	}
	return place{machine: name, path: path}
}

func notInName(r rune) bool {
	return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-'
}

// stream reports whether the place is standard input or output.
func (p place) stream() bool { return p == place{path: "-"} }

// checkStreams refuses a tar on a terminal, or beside the JSON.
func checkStreams(a *app.App, from, to place) error {
	switch {
	case from.stream() && terminal.Is(a.Config.Stdin):
		return errdefs.New(errdefs.Invalid, "cp - to machine %s: standard input is a terminal; give it a tar, such as from `tar c FOLDER |`", to.machine)
	case to.stream() && terminal.Is(a.Config.Stdout):
		return errdefs.New(errdefs.Invalid, "cp from machine %s to -: standard output is a terminal; send the tar to a file, or a program such as `| tar t`", from.machine)
	case to.stream() && a.JSON:
		return errdefs.New(errdefs.Invalid, "cp from machine %s to -: the tar is on standard output, where --json would be; leave that out", from.machine)
	}
	return nil
}

func runCopy(ctx context.Context, a *app.App, source, destination string) error {
	from, to := placeOf(source), placeOf(destination)
	if (from.machine == "") == (to.machine == "") {
		return errdefs.New(errdefs.Invalid, "cp %s %s: exactly one of both must be MACHINE:PATH", source, destination)
	}
	inGuest := source
	if from.machine == "" {
		inGuest = destination
	}
	if err := app.CheckUTF8("cp: the argument", inGuest); err != nil {
		return err
	}
	if from.path == "" || to.path == "" {
		return errdefs.New(errdefs.Invalid, "cp %s %s: a path is missing after the colon; . is the home folder there", source, destination)
	}
	if err := checkStreams(a, from, to); err != nil {
		return err
	}
	var result tarstream.Result
	err := a.Once(ctx, func(ctx context.Context, c *client.Client) (err error) {
		moved, hide := a.ByteProgress("copying")
		defer hide()
		up := guest.Copy{Machine: to.machine, Host: from.path, Guest: to.path, Moved: moved}
		down := guest.Copy{Machine: from.machine, Host: to.path, Guest: from.path, Moved: moved}
		switch {
		case from.stream():
			result, err = up.UploadTar(ctx, c, a.Config.Stdin)
		case to.stream():
			result, err = down.DownloadTar(ctx, c, a.Config.Stdout)
		case to.machine != "":
			result, err = up.Upload(ctx, c)
		default:
			result, err = down.Download(ctx, c)
		}
		return err
	})
	if err != nil {
		return err
	}
	if result.Skipped > 0 {
		a.Say(view.Count(int(result.Skipped), "special file") + " left out")
	}
	if to.stream() {
		return nil // what was asked for is there
	}
	return a.Print(app.Output{
		Object: view.Copied{Header: view.NewHeader(), Files: result.Files, Bytes: result.Bytes},
		Human: func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%s, %s\n", view.Count(int(result.Files), "file"), view.Size(int64(result.Bytes)))
			return err
		},
	})
}

// completeCopy completes "MACHINE:"; paths on the host are the shell's.
func completeCopy(a *app.App) func(context.Context, []string) []string {
	return func(ctx context.Context, args []string) []string {
		if len(args) > 1 {
			return nil
		}
		names := a.MachineNames(ctx)
		for i := range names {
			names[i] += ":"
		}
		return names
	}
}
