package machinetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakedisk"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakememory"
)

// fakeMachine is the process that stands for QEMU.
type fakeMachine struct {
	spec    fakeSpec
	control net.Listener
	link    net.Listener
	console net.Listener
	// port is our end of the guest's port, guestPort the guest's; services is
	// our end of the guest's line to us.
	port          net.Conn
	guestPort     *os.File
	services      net.Conn
	guestServices *os.File

	memory *guestMemory
	// memoryFile is open as long as the run lives; nil of one that booted.
	memoryFile *os.File

	mu      sync.Mutex
	disk    fakedisk.Disk
	running bool
	clock   guestClock
	// keeper is nil until the first resume; hold keeps it alive.
	keeper *exec.Cmd
	hold   io.Closer

	hostMu sync.Mutex
	host   net.Conn
	relay  sync.WaitGroup
}

// fakeMachineMain is the body of the machine's process. It returns when the
// run has ended.
func fakeMachineMain() error {
	ready := os.NewFile(3, "ready")
	m := &fakeMachine{}
	if err := json.NewDecoder(os.Stdin).Decode(&m.spec); err != nil {
		return err
	}
	if err := m.prepare(); err != nil {
		fmt.Fprintln(ready, errdefs.KindOf(err), err)
		ready.Close()
		return err
	}
	fmt.Fprintln(ready, "ready")
	ready.Close()
	m.relay.Go(m.toHost)
	go m.acceptLinks()
	go m.serveGuest()
	go m.serveConsole()
	for {
		conn, err := m.control.Accept()
		if err != nil {
			select {} // end is about to exit
		}
		go m.serve(conn)
	}
}

// prepare does all that may fail before the run is ready.
func (m *fakeMachine) prepare() error {
	cfg := m.spec.Run
	if text, ok := m.fault("launch-fails"); ok {
		return errors.New(text)
	}
	awaitGone(m.faultPath("launch-waits"))
	for _, path := range []string{cfg.Kernel, cfg.Initramfs} {
		if _, err := os.Stat(path); path != "" && cfg.Incoming == nil && err != nil {
			return fmt.Errorf("open boot file: %w", err)
		}
	}
	if len(cfg.Disk) == 0 {
		return errors.New("open disk: it has no layers")
	}
	stale, err := filepath.Glob(filepath.Join(cfg.Dir, "root-*"))
	if err != nil {
		return err
	}
	for _, path := range append(stale, controlSocket(cfg), linkSocket(cfg), consoleSocket(cfg)) {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	if err := m.load(); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(m.disk.Root, "run/fake"), 0o755); err != nil {
		return err
	}
	if m.port, m.guestPort, err = socketpair(); err != nil {
		return err
	}
	if m.services, m.guestServices, err = socketpair(); err != nil {
		return err
	}
	if m.control, err = net.Listen("unix", controlSocket(cfg)); err != nil {
		return err
	}
	if m.console, err = net.Listen("unix", consoleSocket(cfg)); err != nil {
		return err
	}
	m.link, err = net.Listen("unix", linkSocket(cfg))
	return err
}

// faultPath is the path of the fault's file, the machine's own before the
// general one; it may not exist.
func (m *fakeMachine) faultPath(name string) string {
	return faultPath(m.spec, name)
}

func (m *fakeMachine) fault(name string) (string, bool) { return readFault(m.spec, name) }

func readFault(spec fakeSpec, name string) (string, bool) {
	text, err := os.ReadFile(faultPath(spec, name))
	return strings.TrimSpace(string(text)), err == nil
}

func faultPath(spec fakeSpec, name string) string {
	if spec.Faults == "" {
		return filepath.Join(spec.Run.Dir, "no-faults", name)
	}
	path := filepath.Join(spec.Faults, name)
	if _, err := os.Stat(path + "." + spec.Run.MachineName); err == nil {
		return path + "." + spec.Run.MachineName
	}
	return path
}

// boot starts the guest's processes.
func (m *fakeMachine) boot() error {
	held, hold, err := os.Pipe()
	if err != nil {
		return err
	}
	guest := m.spec
	m.memory.change(func(kept *fakememory.Kept) { guest.Kept = *kept })
	spec, err := json.Marshal(guest)
	if err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(exe, fakeArg, "keeper")
	cmd.Dir = m.disk.Root
	cmd.Env = append(os.Environ(), "HOLDPOINT_FAKE_SPEC="+string(spec))
	cmd.Stdin = held
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	started, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer started.Close()
	cmd.ExtraFiles = []*os.File{m.guestPort, m.guestServices, theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return err
	}
	// A pause from here on finds the guest among the keeper's children.
	if _, err := io.ReadAll(started); err != nil {
		return err
	}
	held.Close()
	m.guestPort.Close()
	m.guestServices.Close()
	m.keeper, m.hold = cmd, hold
	go m.awaitKeeper()
	return nil
}

// awaitKeeper ends the run when the guest died by itself.
func (m *fakeMachine) awaitKeeper() {
	_ = m.keeper.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.end(machine.GuestPanic, "the guest's first process ended")
}

// endIfAsked ends the run when a command in the guest asked for it.
func (m *fakeMachine) endIfAsked() {
	for name, reason := range map[string]machine.ExitReason{
		"reset": machine.GuestReset, "poweroff": machine.GuestShutdown, "panic": machine.GuestPanic, "crash": machine.Crashed,
	} {
		if _, err := os.Stat(filepath.Join(m.disk.Root, "run/fake", name)); err == nil {
			m.end(reason, "")
		}
	}
}

// end ends the process; mu is held. A crash and a panic keep nothing that was
// not on the disk before.
func (m *fakeMachine) end(reason machine.ExitReason, message string) {
	if m.keeper != nil {
		pid := m.keeper.Process.Pid
		_ = stopTree(pid)
		if reason == machine.GuestShutdown || reason == machine.GuestReset {
			if err := m.disk.Sync(); err != nil {
				fmt.Fprintln(os.Stderr, "fake machine: "+err.Error())
				reason, message = machine.Crashed, err.Error()
			}
		}
		m.hold.Close()
		awaitProcess(pid)
	}
	// What the guest said last is still delivered.
	done := make(chan struct{})
	go func() {
		m.relay.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(time.Second):
	}
	if reason == machine.Crashed {
		os.Exit(1)
	}
	data, err := json.Marshal(machine.Exit{Reason: reason, Message: message})
	if err == nil {
		path := exitFile(m.spec.Run)
		if err = os.WriteFile(path+".tmp", data, 0o600); err == nil {
			err = os.Rename(path+".tmp", path)
		}
	}
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}
