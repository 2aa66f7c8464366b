// Package shellwords writes commands as people type them. It splits none and
// runs none.
package shellwords

import (
	"slices"
	"strings"
)

// loginShell starts the user's shell, or the best there is, as a login does.
const loginShell = `[ -x "${SHELL:-}" ] && exec "$SHELL" -l; command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l`

// LoginShell is the command that the verb shell runs in a machine.
func LoginShell() []string { return []string{"sh", "-c", loginShell} }

// Shell is LoginShell, but for the login: it keeps the environment it is given.
func Shell() []string { return []string{"sh", "-c", strings.ReplaceAll(loginShell, " -l", "")} }

// IsLoginShell reports whether argv is that of LoginShell.
func IsLoginShell(argv []string) bool { return slices.Equal(argv, LoginShell()) }

// Name names a command for people: quoted, and that of verb shell as "shell".
func Name(argv []string) string {
	if IsLoginShell(argv) || slices.Equal(argv, Shell()) {
		return "shell"
	}
	return Quote(argv...)
}

// Quote writes words as a shell reads them.
func Quote(words ...string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = w
		if w == "" || strings.ContainsFunc(w, unsafe) {
			quoted[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
	}
	return strings.Join(quoted, " ")
}

func unsafe(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("@%+=:,./-_", r)
}
