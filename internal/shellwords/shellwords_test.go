package shellwords_test

import (
	"testing"

	"github.com/holdpoint/holdpoint/internal/shellwords"
)

func TestQuote(t *testing.T) {
	if got, want := shellwords.Quote("a", "", "b c", "it's", "x=/y:1"), `a '' 'b c' 'it'\''s' x=/y:1`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestName(t *testing.T) {
	if got := shellwords.Name(shellwords.LoginShell()); got != "shell" {
		t.Errorf("a login shell is called %s", got)
	}
	if got := shellwords.Name(shellwords.Shell()); got != "shell" {
		t.Errorf("a shell is called %s", got)
	}
	if got, want := shellwords.Name([]string{"sh", "-c", "sleep 1"}), "sh -c 'sleep 1'"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
