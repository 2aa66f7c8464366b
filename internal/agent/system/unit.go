//go:build linux

package system

import (
	"fmt"
	"strings"

	"github.com/holdpoint/holdpoint/internal/agent/command"
)

// onBootUnit runs the on-boot command as a service of the booted system. Its main
// process may go on for ever, and may leave others that do. The shell finds the
// program by the PATH of its environment.
func onBootUnit(program command.Spec) string {
	var b strings.Builder
	b.WriteString(`[Unit]
Description=On-boot command of this holdpoint machine
After=multi-user.target

[Service]
Type=exec
RemainAfterExit=yes
Environment=LANG=C.UTF-8
`)
	for _, e := range program.Env {
		fmt.Fprintf(&b, "Environment=%s\n", quote(e))
	}
	user, group, grouped := strings.Cut(program.User, ":")
	if user == "" {
		user = "root"
	}
	fmt.Fprintf(&b, "User=%s\n", line(user))
	if grouped {
		fmt.Fprintf(&b, "Group=%s\n", line(group))
	}
	dir := "-~"
	if program.Dir != "" {
		dir = line(program.Dir)
	}
	// The colon: systemd replaces no variables in the words.
	fmt.Fprintf(&b, "WorkingDirectory=%s\nExecStart=:/bin/sh -c %s sh", dir, quote(`exec "$@"`))
	for _, word := range program.Argv {
		b.WriteString(" " + quote(word))
	}
	b.WriteString("\n")
	return b.String()
}

// quote writes a word as systemd reads it (systemd.syntax(7), "Quoting").
func quote(word string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, c := range []byte(word) {
		switch {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c < ' ' || c == 0x7f:
			fmt.Fprintf(&b, `\x%02x`, c)
		case c == '%':
			b.WriteString("%%")
		default:
			b.WriteByte(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// line writes a value that is one line and cannot be quoted. What does not fit into
// one names nothing that could be there.
func line(value string) string {
	return strings.ReplaceAll(strings.Map(func(c rune) rune {
		if c < ' ' {
			return '?'
		}
		return c
	}, value), "%", "%%")
}
