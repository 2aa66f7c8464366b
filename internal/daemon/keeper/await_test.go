//go:build linux

package keeper

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestConsoleEnd: whatever a guest prints, it is one short line that does nothing
// to a terminal.
func TestConsoleEnd(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"", ""},
		{"\r\n \r\n", ""},
		{"one\ntwo\nthree\r\n\r\nfour\r\n", "two | three | four"},
		{"\x1b[1;31mred\x1b[0m\x1b]0;title\x07 and\tmore\a\x00\x1b7\u202e\xff", "red and more"},
		{strings.Repeat("lost\n", 10_000) + "a\nb\nc", "a | b | c"},
		{strings.Repeat("é", 5000), "..." + strings.Repeat("é", 150)},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "console.log"), []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := consoleEnd(dir); got != tt.want {
			t.Errorf("%.60q: %q, want %q", tt.text, got, tt.want)
		}
	}
	if got := consoleEnd(t.TempDir()); got != "" {
		t.Errorf("of no log: %q", got)
	}
}
