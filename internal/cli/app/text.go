package app

import (
	"slices"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// checkText refuses arguments and flags that are not UTF-8: no message to the
// daemon can carry them. Names of files on this host stay here.
func checkText(cmd *cobra.Command, v Verb, args []string) error {
	var err error
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if err == nil && f.Name != "home" && !slices.Contains(v.HostFlags, f.Name) {
			err = CheckUTF8(NameOf(cmd)+": the value of --"+f.Name, valuesOf(f)...)
		}
	})
	if err != nil || v.HostArgs {
		return err
	}
	return CheckUTF8(NameOf(cmd)+": the argument", args...)
}

func valuesOf(f *pflag.Flag) []string {
	if list, ok := f.Value.(pflag.SliceValue); ok {
		return list.GetSlice()
	}
	return []string{f.Value.String()}
}

// CheckUTF8 refuses (INVALID) a text that is not UTF-8; what says where it
// stands.
func CheckUTF8(what string, texts ...string) error {
	for _, text := range texts {
		if !utf8.ValidString(text) {
			return errdefs.New(errdefs.Invalid, "%s %q is not UTF-8, and cannot be passed on", what, text)
		}
	}
	return nil
}
