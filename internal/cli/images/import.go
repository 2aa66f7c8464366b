package images

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

type importOptions struct {
	name      string
	kernel    string
	initrd    string
	sha256    string
	partition uint32
}

// NewImport is the verb `image import`.
func NewImport(a *app.App) *cobra.Command {
	var o importOptions
	cmd := a.Command(app.Verb{
		Use: "import FILE --name NAME [flags]", Short: "Make an image of a disk, such as a cloud image",
		Long: `Make an image of a disk that somebody else made: a raw or qcow2 file with a bare
ext4 file system, or with a GUID partition table and the root on ext4, as cloud
images have it. The root is copied out; FILE is never written to. Its kernel and
modules are taken too, unless --kernel gives others. Nothing in FILE is run, and
nothing mounted. Programs are those of FILE, but the guest agent is PID 1: its
init system is not started. run --disk-size makes a machine's disk larger.`,
		Example: `  holdpoint image import debian-12-genericcloud-amd64.qcow2 --name cloud --sha256 9a1f…
  holdpoint image import root.ext4 --name mine --kernel vmlinuz --initrd initrd.img`,
		MinArgs: 1, MaxArgs: 1, Effect: true, Cancels: true, Object: view.ImageDone{},
		Kinds: []errdefs.Kind{
			errdefs.NotFound, errdefs.AlreadyExists, errdefs.Conflict, errdefs.RequestIDConflict, errdefs.Unsupported,
			errdefs.NoSpace, errdefs.Storage, errdefs.Deadline,
		},
		Run: func(ctx context.Context, args []string) error { return runImport(ctx, a, args[0], o) },
	})
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "name of the image")
	f.StringVar(&o.kernel, "kernel", "", "kernel to boot, a bzImage (default the newest one of the disk)")
	f.StringVar(&o.initrd, "initrd", "", "initial RAM disk with the modules of --kernel (default those of the disk)")
	f.StringVar(&o.sha256, "sha256", "", "digest that FILE must have, checked before anything is used")
	f.Uint32Var(&o.partition, "partition", 0, "number of the root's partition (default the one that holds /etc and an init or a shell)")
	return cmd
}

func runImport(ctx context.Context, a *app.App, file string, o importOptions) error {
	if o.name == "" {
		return errdefs.New(errdefs.Invalid, "image import: give the image a name with --name")
	}
	req := &holdpointv1.ImportImageRequest{RequestId: a.RequestID(), Name: o.name, Sha256: o.sha256, Partition: o.partition}
	req.Path, req.Kernel, req.Initrd = file, o.kernel, o.initrd
	for _, path := range []*string{&req.Path, &req.Kernel, &req.Initrd} {
		if *path == "" {
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return fmt.Errorf("image import: %w", err)
		}
		*path = absolute
	}
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, true, c.Images.Import, req)
		if err != nil {
			return err
		}
		return printImage(a, op)
	})
}
