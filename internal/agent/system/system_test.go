//go:build linux

package system

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent/command"
)

func TestLayOut(t *testing.T) {
	for _, onBoot := range []*command.Spec{nil, {Argv: []string{"/bin/sh", "-c", "nginx"}}} {
		run := t.TempDir()
		if err := layOut(run, onBoot); err != nil {
			t.Fatal(err)
		}
		if target, err := os.Readlink(filepath.Join(run, "systemd/system/tmp.mount")); err != nil || target != "/dev/null" {
			t.Errorf("tmp.mount leads to %q, %v", target, err)
		}
		text, err := os.ReadFile(filepath.Join(run, "tmpfiles.d/tmp.conf"))
		if err != nil || strings.ContainsAny(string(text), "DRq") {
			t.Errorf("what removes files: %q, %v", text, err)
		}
		unit, err := os.ReadFile(filepath.Join(run, "systemd/system/multi-user.target.wants/holdpoint-on-boot.service"))
		if onBoot == nil {
			if !errors.Is(err, os.ErrNotExist) {
				t.Errorf("an on-boot service without a command: %v", err)
			}
			continue
		}
		if err != nil || string(unit) != onBootUnit(*onBoot) {
			t.Errorf("unit %q, %v", unit, err)
		}
	}
}

// TestOnBootUnit: what a word has stays in its word, and no line begins another.
func TestOnBootUnit(t *testing.T) {
	unit := onBootUnit(command.Spec{
		Argv: []string{"server", "a\"b\\c", "100%\n$HOME"}, Env: []string{"A=1 2", "B=\n[Unit]"},
		User: "app\nExecStart=x:1000", Dir: "/srv/%i",
	})
	for _, want := range []string{
		`ExecStart=:/bin/sh -c "exec \"$@\"" sh "server" "a\"b\\c" "100%%\x0a$HOME"`,
		`Environment="A=1 2"`, `Environment="B=\x0a[Unit]"`, "User=app?ExecStart=x", "Group=1000", "WorkingDirectory=/srv/%%i",
	} {
		if !slices.Contains(strings.Split(unit, "\n"), want) {
			t.Errorf("no line %q in\n%s", want, unit)
		}
	}
	if unit := onBootUnit(command.Spec{Argv: []string{"x"}}); !strings.Contains(unit, "User=root\nWorkingDirectory=-~\n") {
		t.Errorf("of nobody, nowhere:\n%s", unit)
	}
}

func TestAwaitFile(t *testing.T) {
	dir := t.TempDir()
	awaited := make(chan error, 1)
	go func() { awaited <- awaitFile(t.Context(), dir, "private") }()
	for _, name := range []string{"other", "private"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-awaited; err != nil {
		t.Error(err)
	}
	if err := awaitFile(t.Context(), dir, "private"); err != nil {
		t.Errorf("one that is there: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := awaitFile(ctx, dir, "never"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one that does not come: %v", err)
	}
}

func TestAwaitBus(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "private"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := awaitBus(ctx, dir, "private"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one that nobody serves: %v", err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		for range 2 { // the first one has gone away
			if conn, err := l.Accept(); err == nil {
				_, _ = conn.Read(make([]byte, 64))
				_, _ = conn.Write([]byte("OK 00\r\n"))
				_ = conn.Close()
			}
		}
	}()
	if err := awaitBus(t.Context(), dir, "private"); err != nil {
		t.Error(err)
	}
	<-served
}

func TestKeepJournal(t *testing.T) {
	root := t.TempDir()
	journal := filepath.Join(root, "var/log/journal")
	if err := os.MkdirAll(filepath.Join(journal, "one"), 0o755); err != nil {
		t.Fatal(err)
	}
	// Repeated, and of a fork of a fork.
	for _, step := range [][2]string{{"one", "two"}, {"one", "two"}, {"two", "three"}} {
		if err := KeepJournal(root, step[0], step[1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(journal, "one", "system.journal"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(journal, "three", "system.journal")); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(filepath.Join(root, "run/log")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a journal that is kept nowhere: %v", err)
	}
}

func TestEnding(t *testing.T) {
	for verb, want := range map[string]int{
		"poweroff": unix.LINUX_REBOOT_CMD_POWER_OFF, "halt": unix.LINUX_REBOOT_CMD_POWER_OFF, "": unix.LINUX_REBOOT_CMD_POWER_OFF,
		"reboot": unix.LINUX_REBOOT_CMD_RESTART, "kexec": unix.LINUX_REBOOT_CMD_RESTART,
	} {
		if got := ending(verb); got != want {
			t.Errorf("%q ends with %#x, not %#x", verb, got, want)
		}
	}
}

// TestStrangersAreLetGo: only process 1 ends a wait, others are let go at once.
func TestStrangersAreLetGo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "door")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	s := &System{listener: l, waiting: make(chan struct{})}
	waiting := s.waiting
	listened := make(chan struct{})
	go func() { defer close(listened); s.listen() }()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("read %d, %v, want the end", n, err)
	}
	select {
	case <-waiting:
		t.Error("a stranger has ended the wait")
	default:
	}
	s.Release() // nobody waits
	_ = l.Close()
	<-listened
}
