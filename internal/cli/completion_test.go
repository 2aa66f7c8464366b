package cli_test

import (
	"os/exec"
	"strings"
	"testing"
)

// The script for bash completes in a shell that knows nothing of the package
// bash-completion, also words with a colon or an equals sign in them.
func TestBashCompletion(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash here")
	}
	r := holdpoint(t.TempDir(), "", "completion", "bash")
	if r.code != 0 || r.stderr != "" {
		t.Fatalf("completion bash: %+v", r)
	}
	// What the script asks is printed, and answered with the candidates.
	const driver = `
exec 3>&1
holdpoint() { printf '<%s>' "$@" >&3; printf '%s\n' "$CANDIDATES" :4; }
compopt() { :; } # the real one works only while the shell completes
COMP_TYPE=9 COMP_KEY=9
complete_line() {
    COMP_LINE=$1; shift
    COMP_POINT=${#COMP_LINE} COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    __start_holdpoint
    printf ' -> %s\n' "${COMPREPLY[*]}" >&3
}
CANDIDATES=web complete_line 'holdpoint start w' holdpoint start w
CANDIDATES=web complete_line 'holdpoint start ' holdpoint start ''
CANDIDATES=web: complete_line 'holdpoint cp web:' holdpoint cp web :
CANDIDATES=restore complete_line 'holdpoint restore web c1 --routes=r' holdpoint restore web c1 --routes = r
`
	cmd := exec.Command(bash, "--norc", "--noprofile", "-c", r.stdout+driver)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := `<__complete><start><w> -> web
<__complete><start><> -> web
<__complete><cp><web:> -> 
<__complete><restore><web><c1><--routes=r> -> restore
`
	if got := string(out); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, strings.TrimSpace(want))
	}
}
