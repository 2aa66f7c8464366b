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
	tag       string
	size      string
}

// NewImport is the verb `image import`.
func NewImport(a *app.App) *cobra.Command {
	var o importOptions
	var cmd *cobra.Command
	cmd = a.Command(app.Verb{
		Use: "import FILE --name NAME [flags]", Short: "Make an image of a disk or of a container image",
		Long: `Make an image of what somebody else made. FILE, which is recognized by its content
and never written to, is one of:

A disk, such as a cloud image: a raw or qcow2 file with a bare ext4 file system, or
with a GUID partition table and the root on ext4. The root is copied out. Its kernel
and modules are taken too, unless --kernel gives others.

A container image for linux/amd64: an OCI layout, a folder or a tar, or what "docker
save" writes. Its layers become the root. It has no kernel: that of the image debian
is taken, unless --kernel gives another. Its user, folder and environment are those
of exec, shell and on-boot commands unless others are given, and its entrypoint and
command run at every boot unless run --on-boot says otherwise.

Nothing in FILE is run, and nothing mounted. Programs are those of FILE, but the guest
agent is PID 1: an init system is not started. run --disk-size makes a machine's disk
larger.`,
		Example: `  holdpoint image import debian-12-genericcloud-amd64.qcow2 --name cloud --sha256 9a1f…
  holdpoint image import root.ext4 --name mine --kernel vmlinuz --initrd initrd.img
  docker save redis:7 -o redis.tar && holdpoint image import redis.tar --name redis`,
		MinArgs: 1, MaxArgs: 1, Effect: true, Cancels: true, Object: view.ImageDone{},
		Kinds: []errdefs.Kind{
			errdefs.NotFound, errdefs.AlreadyExists, errdefs.Conflict, errdefs.RequestIDConflict, errdefs.Unsupported,
			errdefs.NoSpace, errdefs.Storage, errdefs.Deadline,
		},
		Run: func(ctx context.Context, args []string) error {
			if o.partition == 0 && cmd.Flags().Changed("partition") {
				return errdefs.New(errdefs.Invalid, "image import %s: --partition 0: they are numbered from 1; leave it out to have the root found", args[0])
			}
			return runImport(ctx, a, args[0], o)
		},
	})
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "name of the image")
	f.StringVar(&o.kernel, "kernel", "", "kernel to boot, a bzImage (default the newest one of the disk, or that of the image debian)")
	f.StringVar(&o.initrd, "initrd", "", "initial RAM disk with the modules of --kernel (default those of the disk)")
	f.StringVar(&o.sha256, "sha256", "", "digest that FILE must have, checked before anything is used")
	f.Uint32Var(&o.partition, "partition", 0, "number of the root's partition (default the one that holds /etc and an init or a shell)")
	f.StringVar(&o.tag, "tag", "", "which of several container images in FILE, such as redis:7")
	f.StringVar(&o.size, "size", "", "size of a container image's disk, such as 4G (default what it holds and as much again, or 1G)")
	return cmd
}

func runImport(ctx context.Context, a *app.App, file string, o importOptions) error {
	if o.name == "" {
		return errdefs.New(errdefs.Invalid, "image import: give the image a name with --name")
	}
	req := &holdpointv1.ImportImageRequest{RequestId: a.RequestID(), Name: o.name, Sha256: o.sha256, Partition: o.partition, Tag: o.tag}
	if o.size != "" {
		var err error
		if req.DiskBytes, err = view.ParseSize(o.size); err != nil {
			return err
		}
	}
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
