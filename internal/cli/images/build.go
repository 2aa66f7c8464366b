package images

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// maxScript is the largest --script in bytes; it travels in one message.
const maxScript = 1 << 20

type buildOptions struct {
	name     string
	packages []string
	script   string
	size     string
}

// NewBuild is the verb `image build`.
func NewBuild(a *app.App) *cobra.Command {
	var o buildOptions
	cmd := a.Command(app.Verb{
		Use: "build debian|debian-systemd|FILE [flags]", Short: "Build an image from a distribution's packages",
		Long: `Build an image: kernel, initramfs and root disk, from a distribution's packages. Root
or an ordinary user can do it; the first build downloads the packages.

"debian" is built in, and so is "debian-systemd", which is the same with systemd as its
machines' init, D-Bus and logind. --packages, --script and --size add to these two, and
do not go with FILE.

FILE is a recipe file, which says what is added to "debian": a line each of a key and
its words, blanks in one between double quotes. SOURCE is in the file's folder.

  packages NAME...                  more packages
  user NAME                         is created with the id 1000, and is the default
                                    of exec, shell and on-boot commands
  file SOURCE DESTINATION [owner=USER[:GROUP]] [mode=OCTAL]
                                    a file, or a folder with all in it; root's and
                                    0644 by default, 0755 what is executable
  script SOURCE                     runs as root in the image when all else is there
  size SIZE                         of the root disk, such as 4G (default 8G)`,
		Example: `  holdpoint image build debian
  holdpoint image build debian-systemd
  holdpoint image build debian --name web --packages redis,postgresql --script setup.sh
  holdpoint image build web.recipe`,
		MinArgs: 1, MaxArgs: 1, HostFlags: []string{"script"}, Effect: true, Cancels: true, Object: view.ImageDone{},
		Kinds: []errdefs.Kind{
			errdefs.NotFound, errdefs.AlreadyExists, errdefs.RequestIDConflict, errdefs.Unsupported,
			errdefs.NoSpace, errdefs.Storage, errdefs.Deadline,
		},
		Complete: app.First(func(context.Context) []string { return []string{"debian", "debian-systemd"} }),
		Run:      func(ctx context.Context, args []string) error { return runBuild(ctx, a, args[0], o) },
	})
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "name of the image (default debian or debian-systemd, or that of FILE up to its first dot)")
	f.StringSliceVar(&o.packages, "packages", nil, "more packages, separated by commas; not with FILE")
	f.StringVar(&o.script, "script", "", "shell script, run as root in the image when packages are installed; not with FILE")
	f.StringVar(&o.size, "size", "", "size of the root disk, such as 4G; not with FILE (default 8G)")
	return cmd
}

func runBuild(ctx context.Context, a *app.App, recipe string, o buildOptions) error {
	req := &holdpointv1.BuildImageRequest{RequestId: a.RequestID(), Recipe: recipe, Name: o.name, Packages: o.packages}
	var err error
	if recipe != "debian" && recipe != "debian-systemd" {
		if err := byFile(req, recipe, o); err != nil {
			return err
		}
	}
	if o.size != "" {
		if req.DiskBytes, err = view.ParseSize(o.size); err != nil {
			return err
		}
	}
	if o.script != "" {
		if req.Script, err = readScript(o.script); err != nil {
			return err
		}
	}
	return a.With(ctx, func(c *client.Client) error {
		op, err := app.Operate(ctx, a, c, true, c.Images.Build, req)
		if err != nil {
			return err
		}
		return printImage(a, op)
	})
}

// byFile asks for what a recipe file says.
func byFile(req *holdpointv1.BuildImageRequest, file string, o buildOptions) (err error) {
	if len(o.packages) > 0 || o.script != "" || o.size != "" {
		return errdefs.New(errdefs.Invalid, "image build %s: --packages, --script and --size go with debian and debian-systemd; write them into the recipe file", file)
	}
	if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
		return errdefs.New(errdefs.NotFound, "image build %s: there is no such recipe file, and what is built in is debian and debian-systemd", file)
	}
	if o.name == "" {
		req.Name, _, _ = strings.Cut(filepath.Base(file), ".")
	}
	req.Recipe = ""
	req.RecipeFile, err = filepath.Abs(file)
	return err
}

func readScript(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", errdefs.As(errdefs.Invalid, fmt.Errorf("read script: %w", err))
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxScript+1))
	if err != nil {
		return "", errdefs.As(errdefs.Invalid, fmt.Errorf("read script: %w", err))
	}
	if len(text) > maxScript {
		return "", errdefs.New(errdefs.Invalid, "read script %s: it is larger than %s", path, view.Size(maxScript))
	}
	if !utf8.Valid(text) {
		return "", errdefs.New(errdefs.Invalid, "read script %s: it is not UTF-8", path)
	}
	return string(text), nil
}
