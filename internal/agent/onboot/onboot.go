//go:build linux

// Package onboot starts the one program that the agent starts by itself, when
// the guest has booted, and keeps the end of what it prints. It does not start
// it again: it is no service manager.
package onboot

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/agent/command"
)

const (
	// logFile is where the output of the on-boot command goes, in the guest.
	logFile = "/run/holdpoint/on-boot.log"
	// logLimit is the size at which the log is begun anew, the old one kept as
	// on-boot.log.1; it lives in memory.
	logLimit = 1 << 20
	// consoleLimit is how much of it goes to the console too.
	consoleLimit = 64 << 10
)

// Config is where a program runs.
type Config struct {
	Commands *command.Set
	// World is the machine's root.
	World   string
	Console io.Writer
	Log     *slog.Logger
	// Group has what attends to the program until it and all that holds its output
	// open have ended.
	Group *sync.WaitGroup
}

// Start starts the program. Its output goes to a log in memory and the beginning
// of it to the console; daemons that hold it open are read for as long as they
// live. One that cannot be started is told there, and no error: who repairs the
// machine must get in.
func Start(cfg Config, program command.Spec) error {
	name := filepath.Join(cfg.World, logFile)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return fmt.Errorf("run on-boot command: %w", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("run on-boot command: %w", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		_, _ = r.Close(), w.Close()
		return fmt.Errorf("run on-boot command: %w", err)
	}
	child, err := cfg.Commands.Spawn(program, &syscall.SysProcAttr{Setsid: true}, null, w, w)
	if err != nil {
		cfg.Log.Error("the on-boot command could not be started", "error", err)
		_, _ = fmt.Fprintf(w, "holdpoint: %v\n", err) // far less than a pipe takes
	}
	_, _ = null.Close(), w.Close()
	cfg.Group.Go(func() {
		defer r.Close()
		l := &log{name: name, console: cfg.Console}
		defer l.close()
		_, _ = io.Copy(l, r) // the pipe's end is the end of all that wrote to it
	})
	if child == nil {
		return nil
	}
	cfg.Group.Go(func() {
		<-child.Done()
		cfg.Log.Info("the on-boot command has ended", "exit_code", child.Code())
	})
	return nil
}

// log is the bounded log of the program.
type log struct {
	name    string
	console io.Writer
	told    int
	f       *os.File
	size    int
}

// Write never fails: a log that cannot be written must not end a server.
func (l *log) Write(p []byte) (int, error) {
	if l.told < consoleLimit {
		_, _ = l.console.Write(p)
		if l.told += len(p); l.told >= consoleLimit {
			_, _ = io.WriteString(l.console, "\nholdpoint: more of the on-boot command's output is in "+logFile+"\n")
		}
	}
	if l.f == nil || l.size+len(p) > logLimit {
		l.close()
		_ = os.Rename(l.name, l.name+".1")
		l.f, _ = os.OpenFile(l.name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
		l.size = 0
	}
	if l.f != nil {
		_, _ = l.f.Write(p)
		l.size += len(p)
	}
	return len(p), nil
}

func (l *log) close() {
	if l.f != nil {
		_ = l.f.Close()
		l.f = nil
	}
}
