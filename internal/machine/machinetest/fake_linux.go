// Package machinetest has what proves a machine.Hypervisor: the suite that
// each implementation passes, and the fake one, which runs no guest kernel but
// is otherwise as real as can be. It is for tests and is no part of the product.
package machinetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakedisk"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakememory"
	"github.com/holdpoint/holdpoint/internal/undo"
)

// fakeArg is the argument by which a binary knows that it is to be a part of
// a fake run.
const fakeArg = "fake-hypervisor"

// FakeMain must be called first in main or TestMain of every binary that uses
// the fake, for each run is a process of that binary's. It returns when the
// process is not one of those.
func FakeMain() {
	if len(os.Args) != 3 || os.Args[1] != fakeArg {
		return
	}
	var err error
	switch os.Args[2] {
	case "machine":
		err = fakeMachineMain()
	case "keeper":
		err = fakeKeeperMain()
	case "guest":
		err = fakeGuestMain()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// FakeConfig is the configuration of a Fake.
type FakeConfig struct {
	// Executable is a binary that calls FakeMain; empty for this one.
	Executable string
	// Faults is a folder in which tests put files that make runs misbehave;
	// empty for none. A file counts for all machines, or with ".NAME" added
	// for the machine of that name:
	//
	//	launch-fails       Launch is an error; the file's content is its text
	//	launch-waits       Launch waits until the file is gone
	//	boot-waits         the guest does not answer until the file is gone
	//	boot-fails         the guest prints the content and shuts down
	//	configure-fails    the guest will not be configured, which is UNSUPPORTED;
	//	                   the content says why
	//	shutdown-waits     the guest does not shut down until the file is gone
	//	shutdown-fails     the guest cannot shut down; the content says why
	//	slow-link          the link waits as many milliseconds per chunk as it says
	//
	// From inside, a command ends the run by making one of these files, which
	// is seen when a command ends: run/fake/reset (GuestReset), run/fake/poweroff
	// (GuestShutdown), run/fake/panic (GuestPanic), run/fake/crash (Crashed).
	Faults string
}

// Fake is a machine.Hypervisor without a hypervisor. A run is three processes:
// the machine, which stands for QEMU (its pid is the run's; it owns the disk
// and the sockets); the guest, which serves the real guest agent with the
// folder Dir/root-RUNID as its working directory; and a keeper between them,
// which ends all the guest's processes when the machine's process dies.
//
// Absolute paths in commands are those of the host: tests use relative ones.
// What a guest wrote is on its disk when a command or an upload has ended, when
// the run is paused, and when it ends in order; a power cut loses the rest.
type Fake struct {
	cfg FakeConfig
}

// NewFake returns a Fake.
func NewFake(cfg FakeConfig) *Fake { return &Fake{cfg: cfg} }

// FakeOverlays makes and seals layers of fake disks, in the form in which real
// ones are made and sealed.
type FakeOverlays struct{}

// Create makes an empty layer at path.
func (FakeOverlays) Create(_ context.Context, path string, virtualBytes int64) error {
	return fakedisk.Create(path, virtualBytes)
}

// CheckFile refuses a file that is no fake disk.
func (FakeOverlays) CheckFile(path string) error { return fakedisk.Check(path) }

// Seal makes the layer at path read-only and returns what it takes, in bytes.
func (FakeOverlays) Seal(_ context.Context, path string) (storedBytes int64, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, fmt.Errorf("seal fake layer: %w", err)
	}
	if err := os.Chmod(path, 0o400); err != nil {
		return 0, fmt.Errorf("seal fake layer: %w", err)
	}
	return info.Size(), nil
}

// fakeSpec is what the processes of a run are told.
type fakeSpec struct {
	Run    machine.RunConfig
	Faults string
	// Kept is what a guest that starts knows already; only guests get it.
	Kept fakememory.Kept
}

func (f *Fake) spec(cfg machine.RunConfig) fakeSpec { return fakeSpec{Run: cfg, Faults: f.cfg.Faults} }

func controlSocket(cfg machine.RunConfig) string { return filepath.Join(cfg.SocketDir, "fake.sock") }

func linkSocket(cfg machine.RunConfig) string { return filepath.Join(cfg.SocketDir, "link.sock") }

func exitFile(cfg machine.RunConfig) string {
	return filepath.Join(cfg.Dir, "exit-"+cfg.RunID+".json")
}

func rootDir(cfg machine.RunConfig) string { return filepath.Join(cfg.Dir, "root-"+cfg.RunID) }

// executable is the binary that calls FakeMain.
func (f *Fake) executable() (string, error) {
	if f.cfg.Executable != "" {
		return f.cfg.Executable, nil
	}
	exe, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find own binary: %w", err)
	}
	return exe, nil
}

// Launch starts the machine's process and waits until it is ready.
func (f *Fake) Launch(ctx context.Context, cfg machine.RunConfig) (machine.Run, error) {
	var built undo.Stack
	defer built.Run()
	consolePath := filepath.Join(cfg.Dir, "console.log")
	if _, err := os.Lstat(consolePath); errors.Is(err, fs.ErrNotExist) {
		built.Add(func() { os.Remove(consolePath) })
	}
	built.Add(func() { removeFiles(cfg) })
	exe, err := f.executable()
	if err != nil {
		return nil, err
	}
	spec := f.spec(cfg)
	specText, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	console, err := os.OpenFile(consolePath, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open console: %w", err)
	}
	defer console.Close()
	ready, theirs, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer ready.Close()
	cmd := exec.Command(exe, fakeArg, "machine")
	cmd.Dir = cfg.Dir
	cmd.Env = append(os.Environ(), "HOLDPOINT_FAKE_RUN="+cfg.RunID)
	cmd.Stdin = bytes.NewReader(specText)
	cmd.Stderr = console
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return nil, fmt.Errorf("start fake machine: %w", err)
	}
	built.Add(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if err := awaitReady(ctx, ready); err != nil {
		return nil, err
	}
	p, err := identify(cmd.Process.Pid)
	if err != nil {
		return nil, err
	}
	run, err := newFakeRun(spec, p)
	if err != nil {
		return nil, err
	}
	built.Release()
	// From here on fakeRun proves and reaps the exit, by pidfd.
	_ = cmd.Process.Release()
	return run, nil
}

// removeFiles takes away what a failed launch left.
func removeFiles(cfg machine.RunConfig) {
	os.RemoveAll(rootDir(cfg))
	for _, path := range []string{controlSocket(cfg), linkSocket(cfg), consoleSocket(cfg), exitFile(cfg)} {
		os.Remove(path)
	}
}

// awaitReady reads the one line that the machine's process says: "ready", or
// the kind of error and why not.
func awaitReady(ctx context.Context, ready *os.File) error {
	stop := context.AfterFunc(ctx, func() { ready.Close() })
	defer stop()
	text, err := io.ReadAll(io.LimitReader(ready, 4096))
	switch line := strings.TrimSpace(string(text)); {
	case ctx.Err() != nil:
		return fmt.Errorf("launch fake machine: %w", context.Cause(ctx))
	case line == "ready":
		return nil
	case line != "":
		kind, why, _ := strings.Cut(line, " ")
		return errdefs.New(errdefs.Kind(kind), "launch fake machine: %s", why)
	case err != nil:
		return fmt.Errorf("launch fake machine: %w", err)
	}
	return errors.New("launch fake machine: it died at once")
}

// Adopt connects to the machine's process.
func (f *Fake) Adopt(ctx context.Context, cfg machine.RunConfig, p machine.Process) (machine.Run, error) {
	gone := errdefs.New(errdefs.NotFound, "adopt run %s: process %d has ended", cfg.RunID, p.PID)
	now, err := identify(p.PID)
	if err != nil || now != p {
		return nil, gone
	}
	run, err := newFakeRun(f.spec(cfg), p)
	if err != nil {
		return nil, gone
	}
	if _, err := run.call(ctx, request{Op: "status"}); err != nil {
		// Its socket goes before the process does.
		ended := machine.Ended(run)
		if cerr := run.Close(); cerr != nil || ended || errdefs.Is(err, errdefs.WrongState) {
			return nil, gone
		}
		return nil, fmt.Errorf("adopt run %s: %w", cfg.RunID, err)
	}
	return run, nil
}
