package cli

import (
	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/internal/cli/app"
)

// Commands gives the tests all commands with what they were made from.
func Commands(cfg Config) (*cobra.Command, func(*cobra.Command) (app.Verb, bool)) {
	a := app.New(cfg)
	return newRoot(a), a.VerbOf
}
