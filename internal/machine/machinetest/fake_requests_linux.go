package machinetest

import (
	"encoding/json"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakedisk"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakememory"
)

// request and answer are one line each, from a fakeRun or from the guest.
type request struct {
	Op string
	// Window says that it is a step of a window.
	Window bool
	// Layer is that of "switch", "switch-at-rest" and "replace".
	Layer machine.Layer
	// Paths are those of "tmpfs".
	Paths []string
	// Data is the ConfigureRequest of "configured".
	Data []byte
	// Nano is the guest's time of "set-clock", the step of "step-clock".
	Nano int64
	// Offset and Length are those of "read".
	Offset, Length int64
	// Reason is that of "end".
	Reason machine.ExitReason
}

type answer struct {
	Running bool
	Pages   []pageRun
	Data    []byte
	// Nano is the guest's time.
	Nano  int64
	Kind  string
	Error string
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
	a, done, err := m.look(req)
	if !done {
		a, err = m.act(req)
	}
	if err != nil {
		a.Kind, a.Error = string(errdefs.KindOf(err)), err.Error()
	}
	return a
}

// look carries out what only looks at memory, which works while the machine
// hangs.
func (m *fakeMachine) look(req request) (a answer, done bool, err error) {
	switch req.Op {
	case "arm":
		a.Pages, err = m.memory.arm()
	case "scan":
		a.Pages, err = m.memory.scan()
	case "read":
		a.Data, err = m.memory.read(req.Offset, req.Length)
	case "configured":
		m.memory.change(func(kept *fakememory.Kept) { kept.Configured = req.Data })
	default:
		return a, false, nil
	}
	return a, true, err
}

func (m *fakeMachine) act(req request) (a answer, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if req.Window && req.Op != "pause" { // whose hangs come when the vCPUs stand still
		if err := m.windowFault(req.Op); err != nil {
			return a, err
		}
	}
	switch req.Op {
	case "status":
	case "pause":
		err = m.pause(req.Window)
	case "resume":
		err = m.resume()
	case "switch":
		err = m.switchDisk(req.Layer)
	case "switch-at-rest":
		if text, ok := m.fault("switch-at-rest-fails"); ok {
			return a, errdefs.New(errdefs.Internal, "switch: %s", text)
		}
		err = m.disk.Switch(req.Layer.Path)
	case "replace":
		err = fakedisk.Check(req.Layer.Path)
	case "devices":
		a.Data, err = m.devices()
	case "tmpfs":
		m.setTmpfs(req.Paths)
	case "clock":
	case "set-clock":
		m.clock.behind = time.Since(time.Unix(0, req.Nano))
	case "step-clock":
		m.clock.behind -= time.Duration(req.Nano)
	case "sync":
		if err = m.disk.Sync(); err == nil {
			m.endIfAsked()
		}
	case "end":
		m.end(req.Reason, "")
	default:
		err = errdefs.New(errdefs.Internal, "no such request")
	}
	a.Running, a.Nano = m.running, m.clock.now().UnixNano()
	return a, err
}

// setTmpfs makes paths memory file systems, besides those of every guest.
func (m *fakeMachine) setTmpfs(paths []string) {
	paths = slices.Concat([]string{"run", "dev/shm"}, paths)
	m.disk.Memory = paths
	m.memory.change(func(kept *fakememory.Kept) { kept.Paths = paths })
}

func (m *fakeMachine) pause(window bool) error {
	was := m.running
	if was {
		if err := stopTree(m.keeper.Process.Pid); err != nil {
			return err
		}
		m.running = false
		m.clock.stop()
		m.memory.stop()
	}
	if window {
		if err := m.windowFault("stop"); err != nil {
			return err
		}
	}
	if !was {
		return nil
	}
	return m.disk.Sync()
}

func (m *fakeMachine) resume() error {
	if m.running {
		return nil
	}
	m.running = true
	m.clock.run()
	m.memory.run()
	if m.keeper != nil {
		return signalTree(m.keeper.Process.Pid, unix.SIGCONT)
	}
	return m.boot()
}

func (m *fakeMachine) switchDisk(top machine.Layer) error {
	if m.running {
		return errdefs.New(errdefs.WrongState, "the run is not paused")
	}
	return m.disk.Switch(top.Path)
}
