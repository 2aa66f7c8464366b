// Package images has the verbs of images: build, import, ls, inspect and rm.
package images

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/shellwords"
)

// NewList is the verb `image ls`.
func NewList(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "ls", Short: "List images", Object: view.Images{},
		Run: func(ctx context.Context, _ []string) error { return runList(ctx, a) },
	})
}

func runList(ctx context.Context, a *app.App) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Images.List(ctx, connect.NewRequest(&holdpointv1.ListImagesRequest{}))
		if err != nil {
			return err
		}
		images := res.Msg.GetImages()
		o := app.Output{Object: view.Images{Header: view.NewHeader(), Images: view.List(images, view.ImageOf)}}
		rows := make([][]string, 0, len(images))
		for _, i := range images {
			o.Terse = append(o.Terse, i.GetBuildId())
			rows = append(rows, []string{
				view.Dash(i.GetName()), view.Short(i.GetBuildId()), i.GetArchitecture(), view.Size(i.GetDiskBytes()),
				view.Size(i.GetStoredBytes()), view.Age(view.TimeOf(i.GetCreatedAt()), time.Now()), usedBy(i),
			})
		}
		o.Human = func(w io.Writer) error {
			return view.Table(w, []string{"NAME", "BUILD ID", "ARCH", "DISK", "STORED", "CREATED", "USED BY"}, rows)
		}
		return a.Print(o)
	})
}

// usedBy counts the machines and checkpoints that need the image.
func usedBy(i *holdpointv1.Image) string {
	switch n := i.GetUsedBy(); n {
	case 0:
		return "nothing"
	case 1:
		return "1 machine or checkpoint"
	default:
		return fmt.Sprintf("%d machines and checkpoints", n)
	}
}

// NewInspect is the verb `image inspect`.
func NewInspect(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "inspect IMAGE", Short: "Show an image", MinArgs: 1, MaxArgs: 1,
		Object: view.ImageObject{}, Kinds: []errdefs.Kind{errdefs.NotFound}, Complete: app.First(a.ImageNames),
		Run: func(ctx context.Context, args []string) error { return runInspect(ctx, a, args[0]) },
	})
}

func runInspect(ctx context.Context, a *app.App, image string) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Images.Get(ctx, connect.NewRequest(&holdpointv1.GetImageRequest{Image: image}))
		if err != nil {
			return err
		}
		i := res.Msg
		return a.Print(app.Output{
			Object: view.ImageObject{Header: view.NewHeader(), Image: view.ImageOf(i)},
			Terse:  []string{i.GetBuildId()},
			Human: func(w io.Writer) error {
				return view.Fields(w, append([][2]string{
					{"name", i.GetName()},
					{"build id", i.GetBuildId()},
					{"description", i.GetDescription()},
					{"architecture", i.GetArchitecture()},
					{"kernel", i.GetKernelVersion()},
					{"disk", view.Size(i.GetDiskBytes())},
					{"stored", view.Size(i.GetStoredBytes())},
					{"created", view.Age(view.TimeOf(i.GetCreatedAt()), time.Now())},
					{"used by", usedBy(i)},
					{"packages", strings.Join(i.GetPackages(), " ")},
				}, programs(i)...))
			},
		})
	})
}

// programs are the fields about programs that the image has.
func programs(i *holdpointv1.Image) [][2]string {
	fields := [][2]string{
		{"user", i.GetUser()}, {"folder", i.GetWorkingDir()}, {"environment", shellwords.Quote(i.GetEnv()...)}, {"on boot", shellwords.Quote(i.GetCommand()...)},
	}
	return slices.DeleteFunc(fields, func(f [2]string) bool { return f[1] == "" })
}

// NewRemove is the verb `image rm`.
func NewRemove(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "rm IMAGE", Short: "Remove an image that nothing uses", MinArgs: 1, MaxArgs: 1, Effect: true,
		Object: view.ImageDone{}, Complete: app.First(a.ImageNames),
		Kinds: []errdefs.Kind{errdefs.NotFound, errdefs.RequestIDConflict, errdefs.Referenced, errdefs.Storage},
		Run:   func(ctx context.Context, args []string) error { return runRemove(ctx, a, args[0]) },
	})
}

func runRemove(ctx context.Context, a *app.App, image string) error {
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, false, c.Images.Remove, &holdpointv1.RemoveImageRequest{RequestId: a.RequestID(), Image: image})
		if err != nil {
			return err
		}
		i, notes := op.GetResult().GetImage(), op.GetResult().GetNotes()
		a.Note(notes)
		name := cmp.Or(i.GetName(), i.GetBuildId())
		return a.Print(app.Output{
			Object: view.ImageDone{Header: view.NewHeader(), Image: view.ImageOf(i), Operation: op.GetId(), Notes: view.Notes(notes)},
			Terse:  []string{name},
			Human:  func(w io.Writer) error { return view.Fields(w, [][2]string{{"removed", name}}) },
		})
	})
}

// printImage prints an operation that is done and left an image.
func printImage(a *app.App, op *client.Operation) error {
	i, notes := op.GetResult().GetImage(), op.GetResult().GetNotes()
	a.Note(notes)
	return a.Print(app.Output{
		Object: view.ImageDone{
			Header: view.NewHeader(), Image: view.ImageOf(i), Operation: op.GetId(), Notes: view.Notes(notes),
		},
		Terse: []string{i.GetBuildId()},
		Human: func(w io.Writer) error {
			return view.Fields(w, [][2]string{
				{"image", i.GetName()},
				{"build id", view.Short(i.GetBuildId())},
				{"kernel", i.GetKernelVersion()},
				{"stored", view.Size(i.GetStoredBytes())},
			})
		},
	})
}
