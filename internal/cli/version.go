package cli

import (
	"context"
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/launch"
	"github.com/holdpoint/holdpoint/internal/cli/view"
)

func newVersion(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "version", Short: "Print the version of this program", Object: view.Version{},
		Run: func(_ context.Context, _ []string) error { return runVersion(a) },
	})
}

func runVersion(a *app.App) error {
	build := launch.Build(a.Config.Version)
	return a.Print(app.Output{
		Object: view.Version{
			Header: view.NewHeader(), Version: a.Config.Version, Build: build,
			Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH,
		},
		Terse: []string{a.Config.Version},
		Human: func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "holdpoint %s (build %s, %s, %s/%s)\n", a.Config.Version, build, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	})
}
