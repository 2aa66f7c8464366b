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

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakedisk"
)

// request and answer are one line each, from a fakeRun or from the guest.
type request struct {
	Op string
	// Layer is that of "switch".
	Layer machine.Layer
	// Paths are those of "memory".
	Paths []string
	// Reason is that of "end".
	Reason machine.ExitReason
}

type answer struct {
	Running bool
	Kind    string
	Error   string
}

// fakeMachine is the process that stands for QEMU.
type fakeMachine struct {
	spec    fakeSpec
	control net.Listener
	link    net.Listener
	// port is our end of the guest's port, guestPort the guest's; services is
	// our end of the guest's line to us.
	port          net.Conn
	guestPort     *os.File
	services      net.Conn
	guestServices *os.File

	mu      sync.Mutex
	disk    fakedisk.Disk
	running bool
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
		fmt.Fprintln(ready, err)
		ready.Close()
		return err
	}
	fmt.Fprintln(ready, "ready")
	ready.Close()
	m.relay.Go(m.toHost)
	go m.acceptLinks()
	go m.serveGuest()
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
		if _, err := os.Stat(path); path != "" && err != nil {
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
	for _, path := range append(stale, controlSocket(cfg), linkSocket(cfg)) {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	var chain []string
	for _, l := range cfg.Disk {
		chain = append(chain, l.Path)
	}
	m.disk = fakedisk.Disk{Root: rootDir(cfg), Memory: []string{"run", "dev/shm"}}
	if err := m.disk.Load(chain); err != nil {
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

// serve answers the requests of one fakeRun conversation.
func (m *fakeMachine) serve(conn net.Conn) {
	defer conn.Close()
	dec, enc := json.NewDecoder(conn), json.NewEncoder(conn)
	for {
		var req request
		if dec.Decode(&req) != nil {
			return
		}
		if enc.Encode(m.do(req)) != nil {
			return
		}
	}
}

// serveGuest answers the guest's requests.
func (m *fakeMachine) serveGuest() {
	dec, enc := json.NewDecoder(m.services), json.NewEncoder(m.services)
	for {
		var req request
		if dec.Decode(&req) != nil {
			return
		}
		if err := enc.Encode(m.do(req)); err != nil {
			return
		}
	}
}

func (m *fakeMachine) do(req request) answer {
	m.mu.Lock()
	defer m.mu.Unlock()
	var err error
	switch req.Op {
	case "status":
	case "pause":
		err = m.pause()
	case "resume":
		err = m.resume()
	case "switch":
		err = m.switchDisk(req.Layer)
	case "memory":
		m.disk.Memory = append([]string{"run", "dev/shm"}, req.Paths...)
	case "sync":
		if err = m.disk.Sync(); err == nil {
			m.endIfAsked()
		}
	case "end":
		m.end(req.Reason, "")
	default:
		err = errdefs.New(errdefs.Internal, "no such request")
	}
	a := answer{Running: m.running}
	if err != nil {
		a.Kind, a.Error = string(errdefs.KindOf(err)), err.Error()
	}
	return a
}

func (m *fakeMachine) pause() error {
	if !m.running {
		return nil
	}
	if err := signalTree(m.keeper.Process.Pid, unix.SIGSTOP); err != nil {
		return err
	}
	m.running = false
	return m.disk.Sync()
}

func (m *fakeMachine) resume() error {
	if m.running {
		return nil
	}
	m.running = true
	if m.keeper != nil {
		return signalTree(m.keeper.Process.Pid, unix.SIGCONT)
	}
	return m.boot()
}

// boot starts the guest's processes.
func (m *fakeMachine) boot() error {
	held, hold, err := os.Pipe()
	if err != nil {
		return err
	}
	spec, err := json.Marshal(m.spec)
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

func (m *fakeMachine) switchDisk(top machine.Layer) error {
	if m.running {
		return errdefs.New(errdefs.WrongState, "the run is not paused")
	}
	return m.disk.Switch(top.Path)
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
		_ = signalTree(pid, unix.SIGSTOP)
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
