//go:build linux

package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/argv"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qemu/isolation"
	"github.com/holdpoint/holdpoint/internal/qemu/logs"
	"github.com/holdpoint/holdpoint/internal/qemu/netdev"
	"github.com/holdpoint/holdpoint/internal/qemu/process"
	"github.com/holdpoint/holdpoint/internal/qemu/reach"
	"github.com/holdpoint/holdpoint/internal/qmp"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// launchTimeout bounds a launch whose ctx does not. QEMU starts in a tenth of
// a second; a host that swaps may take a while.
const launchTimeout = time.Minute

// exitGrace is how long an exit may take to be proven once QEMU has closed its
// sockets.
const exitGrace = 15 * time.Second

// Launch is that of machine.Hypervisor. UNSUPPORTED without a QEMU, NOT_FOUND
// for a missing file, NO_SPACE when the host has not enough memory, CONFLICT
// when another process has the disk open.
func (q *QEMU) Launch(ctx context.Context, cfg machine.RunConfig) (machine.Run, error) {
	if err := check(cfg); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, launchTimeout)
	defer cancel()
	caps, err := q.host.Probe(ctx)
	if err != nil {
		return nil, err
	}
	within, seen, spec, err := reach.Prepare(caps, cfg, q.without)
	if err != nil {
		return nil, fmt.Errorf("prepare run %s: %w", cfg.RunID, err)
	}
	var steps undo.Stack
	defer steps.Run()
	steps.Add(within.Remove)
	args, err := argv.Arguments(caps, seen)
	if err != nil {
		return nil, err
	}
	files, err := prepare(cfg, &steps)
	defer files.close()
	if err != nil {
		return nil, fmt.Errorf("prepare run %s: %w", cfg.RunID, err)
	}
	p, by, err := spawn(append([]string{caps.Binary}, args...), files, spec)
	if err != nil {
		return nil, launchError(cfg, false, err)
	}
	steps.Add(p.KillAndWait)
	client, err := greet(ctx, cfg)
	if err == nil {
		steps.Add(func() { _ = client.Close() })
		err = errors.Join(within.Began(by), q.ready(ctx, caps, cfg, within, p, client))
	}
	if err != nil {
		if ctx.Err() == nil { // QEMU hung up; what it printed is complete when it is gone
			_ = p.Signal(unix.SIGKILL)
			p.AwaitEnd(exitGrace)
		}
		return nil, launchError(cfg, client != nil, err)
	}
	steps.Release()
	return newRun(q, cfg, within, p, client), nil
}

// inherited are the files that QEMU gets, and the event pipe's other end.
type inherited struct {
	output, qmp, link, console, memory, events *os.File
}

func (f *inherited) close() {
	for _, file := range []*os.File{f.output, f.qmp, f.link, f.console, f.memory, f.events} {
		if file != nil {
			_ = file.Close() // QEMU has its own
		}
	}
}

// prepare makes the run's files and sockets; steps take them away again.
func prepare(cfg machine.RunConfig, steps *undo.Stack) (f *inherited, err error) {
	f = &inherited{}
	path := func(name string) string { return filepath.Join(cfg.Dir, name) }
	for _, name := range []string{memoryFile, outputFile, pidFile, killFile, eventsIn, eventsOut} {
		if err := os.Remove(path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return f, err
		}
		steps.Add(func() { _ = os.Remove(path(name)) })
	}
	if _, err := os.Stat(path(consoleFile)); err != nil {
		steps.Add(func() { _ = os.Remove(path(consoleFile)) })
	}
	sizes := map[string]int64{eventsOut: 0, consoleFile: -1}
	if cfg.Incoming == nil {
		sizes[memoryFile] = cfg.MemoryBytes
	} else if f.memory, err = os.Open(cfg.Incoming.MemoryFile); err != nil {
		return f, err
	}
	for name, size := range sizes {
		if err := createFile(path(name), size); err != nil {
			return f, err
		}
	}
	if f.output, err = os.OpenFile(path(outputFile), os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
		return f, err
	}
	for name, file := range map[string]**os.File{qmpSocket: &f.qmp, linkSocket: &f.link, machine.ConsoleSocket: &f.console} {
		if *file, err = bind(filepath.Join(cfg.SocketDir, name), steps); err != nil {
			return f, err
		}
	}
	// QEMU makes this one itself: it takes no descriptor that it has to listen on.
	network := filepath.Join(cfg.SocketDir, netSocket)
	if err := os.Remove(network); err != nil && !errors.Is(err, os.ErrNotExist) {
		return f, err
	}
	steps.Add(func() { _ = os.Remove(network) })
	f.events, err = openEvents(path(eventsIn))
	return f, err
}

// createFile makes a sparse file; of size -1 it may exist and keeps its size.
func createFile(path string, size int64) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil && size >= 0 {
		err = file.Truncate(size)
	}
	if err == nil {
		err = file.Close()
	}
	return err
}

// openEvents makes the pipe from which the second monitor reads, with the one
// command in it that the monitor ever gets. The pipe stays open in QEMU.
func openEvents(path string) (*os.File, error) {
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, fmt.Errorf("make pipe %q: %w", path, err)
	}
	pipe, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	_, err = pipe.WriteString(`{"execute":"qmp_capabilities"}` + "\n")
	return pipe, err
}

// bind makes a socket at path that QEMU will listen on. Connections to it are
// queued from now on, so nobody has to wait for QEMU to get there.
func bind(path string, steps *undo.Stack) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	steps.Add(func() { _ = os.Remove(path) })
	file, err := l.File()
	return file, errors.Join(err, l.Close())
}

// spawn starts the process in a session of its own, so that no terminal's or
// parent's end reaches it, isolated as far as this host can.
func spawn(argv []string, f *inherited, spec isolation.Spec) (*process.Process, machine.Isolation, error) {
	started, by, err := spec.Start(func() *exec.Cmd {
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Dir, cmd.Env = "/", reach.Environment(os.Environ())
		cmd.Stdout, cmd.Stderr = f.output, f.output
		cmd.ExtraFiles = []*os.File{f.qmp, f.link, f.console} // argv.QMPFD, LinkFD and ConsoleFD
		if f.memory != nil {
			cmd.ExtraFiles = append(cmd.ExtraFiles, f.memory) // argv.MemoryFD
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		return cmd
	})
	if err != nil {
		return nil, by, errdefs.New(errdefs.Unsupported, "start QEMU: %w; %s", err, host.PackageAdvice)
	}
	pid := started.Pid
	_ = started.Release() // the exit is awaited by our own handle
	// Our copies would keep a dead QEMU's sockets open.
	_, _, _ = f.qmp.Close(), f.link.Close(), f.console.Close()
	p, err := process.Open(pid)
	if err != nil {
		_ = unix.Kill(pid, unix.SIGKILL) // an unreaped child's pid is still its own
		_, _ = unix.Wait4(pid, nil, 0, nil)
	}
	return p, by, err
}

// greet waits until QEMU has made all devices, its event log is on and its network
// device can be connected to.
func greet(ctx context.Context, cfg machine.RunConfig) (*qmp.Client, error) {
	network := netdev.Subscribe()
	client, err := qmp.Dial(ctx, filepath.Join(cfg.SocketDir, qmpSocket), network)
	if err != nil {
		return nil, err
	}
	defer client.Unsubscribe(network)
	want := "prelaunch"
	if cfg.Incoming != nil {
		want = "inmigrate"
	}
	var status struct{ Status string }
	if err = client.Execute(ctx, "query-status", nil, &status); err == nil && status.Status != want {
		err = fmt.Errorf("its status is %q and not %s", status.Status, want)
	}
	if err == nil {
		err = awaitEvents(ctx, filepath.Join(cfg.Dir, eventsOut))
	}
	if err == nil && cfg.NIC {
		err = netdev.Settle(ctx, network, filepath.Join(cfg.SocketDir, netSocket))
	}
	if err != nil {
		_ = client.Close()
		return nil, err
	}
	return client, nil
}

// awaitEvents waits for the second monitor's answer to its only command.
func awaitEvents(ctx context.Context, path string) error {
	n, err := logs.Watch(path)
	if err != nil {
		return err
	}
	defer n.Close()
	for {
		b, err := os.ReadFile(path)
		if err != nil || bytes.Contains(b, []byte(`"return"`)) {
			return err
		}
		if err := n.Wait(ctx); err != nil {
			return fmt.Errorf("await event log: %w", err)
		}
	}
}

// launchError says why QEMU did not start, or did not load once it had greeted,
// by what it printed.
func launchError(cfg machine.RunConfig, greeted bool, err error) error {
	if errdefs.KindOf(err) != errdefs.Internal {
		return fmt.Errorf("launch run %s: %w", cfg.RunID, err)
	}
	line := printed(cfg)
	switch {
	case greeted && cfg.Incoming != nil && words(cfg) != "":
		return fmt.Errorf("launch run %s: %w", cfg.RunID, loadError(cfg, err))
	case line == "" && hungUp(err):
		return fmt.Errorf("launch run %s: QEMU was ended while it started, without a word (%w); look for a killed process in the host's log, and try again", cfg.RunID, err)
	case line == "":
		return fmt.Errorf("launch run %s: %w", cfg.RunID, err)
	case strings.Contains(line, "Cannot allocate memory"):
		return errdefs.New(errdefs.NoSpace, "launch run %s: the host has not enough memory for a machine of %d MiB (%s); use less --memory or stop another machine",
			cfg.RunID, cfg.MemoryBytes>>20, line)
	case strings.Contains(line, inUse):
		return errdefs.New(errdefs.Conflict, "launch run %s: another process has its disk open: %s", cfg.RunID, line)
	case strings.Contains(line, "KVM") || strings.Contains(line, "host doesn't support requested feature"):
		return errdefs.New(errdefs.Unsupported, "launch run %s: KVM does not work here: %s", cfg.RunID, line)
	}
	return fmt.Errorf("launch run %s: QEMU: %s", cfg.RunID, line)
}

// hungUp tells a QEMU that closed its sockets by ending.
func hungUp(err error) bool {
	return errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// printed is the last line that the process printed.
func printed(cfg machine.RunConfig) string {
	return host.LastLine(string(logs.Tail(filepath.Join(cfg.Dir, outputFile), 4096)))
}

// inUse is in what QEMU prints when it cannot lock an image, noLock in what it
// answers.
const (
	inUse  = "Is another process using the image"
	noLock = "Failed to get \"write\" lock"
)
