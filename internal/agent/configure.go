//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent/identity"
	"github.com/holdpoint/holdpoint/internal/agent/interfaces"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

const (
	// onBootLog is where the output of the on-boot command goes, in the guest.
	onBootLog = "/run/holdpoint/on-boot.log"
	// onBootLogLimit is the size at which the log is begun anew, the old one
	// kept as on-boot.log.1; it lives in memory.
	onBootLogLimit = 1 << 20
	// onBootConsoleLimit is how much of it goes to the console too.
	onBootConsoleLimit = 64 << 10
)

// Configure tells a freshly booted guest who it is.
func (a *Agent) Configure(_ context.Context, req *connect.Request[agentv1.ConfigureRequest]) (*connect.Response[agentv1.ConfigureResponse], error) {
	if err := checkConfigure(req.Msg); err != nil {
		return nil, wire.Encode(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.configured != nil {
		if !sameIdentity(a.configured, req.Msg) {
			return nil, wire.Encode(errdefs.New(errdefs.WrongState, "configure: the machine was told otherwise since it booted; restart it"))
		}
		return connect.NewResponse(&agentv1.ConfigureResponse{}), nil
	}
	if err := a.configure(req.Msg); err != nil {
		return nil, wire.Encode(err)
	}
	a.configured = req.Msg
	return connect.NewResponse(&agentv1.ConfigureResponse{}), nil
}

func checkConfigure(m *agentv1.ConfigureRequest) error {
	if err := identity.Check(m.GetHostname(), m.GetMachineId()); err != nil {
		return fmt.Errorf("configure: %w", err)
	}
	if _, err := interfaces.Parse(m.GetNetwork()); err != nil {
		return fmt.Errorf("configure: %w", err)
	}
	for _, p := range m.GetTmpfs() {
		if !path.IsAbs(p) || path.Clean(p) == "/" {
			return errdefs.New(errdefs.Invalid, "configure: tmpfs %q: use an absolute path below /", p)
		}
	}
	return nil
}

// bringUp sets the network device up; nil leaves it. Where it does not come up,
// the machine is handed out all the same: who repairs it must get in.
func (a *Agent) bringUp(d *agentv1.NetworkDevice) {
	s, err := interfaces.Parse(d)
	if d == nil || err != nil {
		return // checked before
	}
	if a.cfg.Init {
		err = interfaces.Up(s)
	}
	if err = errors.Join(err, interfaces.WriteNameservers(a.cfg.World, s.Nameservers)); err != nil {
		a.cfg.Log.Error("the machine has no network", "error", err)
	}
}

// sameIdentity compares what must stay the same within a boot.
func sameIdentity(a, b *agentv1.ConfigureRequest) bool {
	return a.GetHostname() == b.GetHostname() && a.GetMachineId() == b.GetMachineId() &&
		a.GetOnBoot() == b.GetOnBoot() &&
		strings.Join(a.GetTmpfs(), "\x00") == strings.Join(b.GetTmpfs(), "\x00")
}

func (a *Agent) configure(m *agentv1.ConfigureRequest) error {
	if err := a.tellKernel(m); err != nil {
		return err
	}
	if a.cfg.Init {
		for _, p := range m.GetTmpfs() {
			if err := mountTmpfs(p); err != nil {
				return err
			}
		}
	}
	if err := a.writeNames(m); err != nil {
		return err
	}
	a.bringUp(m.GetNetwork())
	if m.GetOnBoot() == "" {
		return nil
	}
	return a.runOnBoot(m.GetOnBoot())
}

// runOnBoot starts the on-boot command. Its output goes to a log in memory and
// the beginning of it to the console; daemons that hold it open are read for
// as long as they live.
func (a *Agent) runOnBoot(script string) error {
	name := filepath.Join(a.cfg.World, onBootLog)
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
	env, dir := a.commands.RootEnv()
	child, err := a.family.Start("/bin/sh", []string{"/bin/sh", "-c", script}, &syscall.ProcAttr{
		Dir: dir, Env: env, Sys: &syscall.SysProcAttr{Setsid: true},
		Files: []uintptr{null.Fd(), w.Fd(), w.Fd()},
	})
	_, _ = null.Close(), w.Close()
	if err != nil {
		_ = r.Close()
		return fmt.Errorf("run on-boot command: %w", err)
	}
	a.onBoot.Go(func() {
		defer r.Close()
		l := &bootLog{name: name, console: a.cfg.Console}
		defer l.close()
		_, _ = io.Copy(l, r) // the pipe's end is the end of all that wrote to it
	})
	a.onBoot.Go(func() {
		<-child.Done()
		a.cfg.Log.Info("the on-boot command has ended", "exit_code", child.Code())
	})
	return nil
}

// bootLog is the bounded log of the on-boot command.
type bootLog struct {
	name    string
	console io.Writer
	told    int
	f       *os.File
	size    int
}

// Write never fails: a log that cannot be written must not end a server.
func (l *bootLog) Write(p []byte) (int, error) {
	if l.told < onBootConsoleLimit {
		_, _ = l.console.Write(p)
		if l.told += len(p); l.told >= onBootConsoleLimit {
			_, _ = io.WriteString(l.console, "\nholdpoint: more of the on-boot command's output is in "+onBootLog+"\n")
		}
	}
	if l.f == nil || l.size+len(p) > onBootLogLimit {
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

func (l *bootLog) close() {
	if l.f != nil {
		_ = l.f.Close()
		l.f = nil
	}
}
