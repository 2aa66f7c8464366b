package cli

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func newCompletion(a *app.App) *cobra.Command {
	var cmd *cobra.Command
	cmd = a.Command(app.Verb{
		Use: "completion bash|zsh|fish", Short: "Print the completion script for a shell",
		Long: `Print the completion script for a shell. It completes verbs, flags, and the names
of machines, images, checkpoints and routes; it never starts a daemon. The script
for bash works with and without the package bash-completion.`,
		Example: `  source <(holdpoint completion bash)
  holdpoint completion fish > ~/.config/fish/completions/holdpoint.fish`,
		MinArgs: 1, MaxArgs: 1, Complete: app.First(app.Words("bash", "zsh", "fish")),
		Run: func(_ context.Context, args []string) error { return runCompletion(a, cmd.Root(), args[0]) },
	})
	return cmd
}

// bashFallbacks come after cobra's script, which counts on functions of the
// package bash-completion. Where that is not loaded, the command line is put
// together again from the pieces that bash parts at = and :, and what stands
// before the last colon is taken from the candidates, as it is there already.
const bashFallbacks = `
if ! declare -F _get_comp_words_by_ref >/dev/null; then
__holdpoint_init_completion()
{
    local line=$COMP_LINE rest word i n=-1
    words=() cword=0
    for i in "${!COMP_WORDS[@]}"; do
        word=${COMP_WORDS[i]}
        rest=${line#"${line%%[![:space:]]*}"}
        if [[ $n -ge 0 && $line == "$rest" && ( $word == [=:]* || ${words[n]} == *[=:] ) ]]; then
            words[n]+=$word
        else
            n=$((n + 1))
            words[n]=$word
        fi
        line=${rest#"$word"}
        if [[ $i -eq $COMP_CWORD ]]; then
            cword=$n
            break
        fi
    done
    cur=${words[cword]} prev=
    [[ $cword -gt 0 ]] && prev=${words[cword-1]}
    return 0
}
fi
if ! declare -F __ltrim_colon_completions >/dev/null; then
__ltrim_colon_completions()
{
    [[ $1 == *:* && $COMP_WORDBREAKS == *:* ]] || return 0
    local before=${1%"${1##*:}"} i
    for i in "${!COMPREPLY[@]}"; do
        COMPREPLY[i]=${COMPREPLY[i]#"$before"}
    done
}
fi
`

func writeBash(w io.Writer, root *cobra.Command) error {
	if err := root.GenBashCompletionV2(w, true); err != nil {
		return err
	}
	_, err := io.WriteString(w, bashFallbacks)
	return err
}

func runCompletion(a *app.App, root *cobra.Command, shell string) error {
	switch shell {
	case "bash":
		return writeBash(a.Config.Stdout, root)
	case "zsh":
		return root.GenZshCompletion(a.Config.Stdout)
	case "fish":
		return root.GenFishCompletion(a.Config.Stdout, true)
	}
	return errdefs.New(errdefs.Invalid, "completion %s: use bash, zsh or fish", shell)
}
