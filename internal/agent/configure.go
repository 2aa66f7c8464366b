//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent/command"
	"github.com/holdpoint/holdpoint/internal/agent/filesystems"
	"github.com/holdpoint/holdpoint/internal/agent/identity"
	"github.com/holdpoint/holdpoint/internal/agent/interfaces"
	"github.com/holdpoint/holdpoint/internal/agent/onboot"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// systemPatience is how long Configure waits for the init of the disk to take
// orders, within what the host waits for the answer.
const systemPatience = 40 * time.Second

// Configure tells a freshly booted guest who it is.
func (a *Agent) Configure(ctx context.Context, req *connect.Request[agentv1.ConfigureRequest]) (*connect.Response[agentv1.ConfigureResponse], error) {
	err := checkConfigure(req.Msg)
	if err == nil {
		err = a.configureOnce(req.Msg)
	}
	if err != nil {
		return nil, wire.Encode(err)
	}
	if a.cfg.System != nil {
		waiting, cancel := context.WithTimeout(ctx, systemPatience)
		defer cancel()
		if err := a.cfg.System.AwaitReady(waiting); err != nil {
			a.cfg.Log.Warn("the system does not take orders yet", "error", err)
		}
	}
	return connect.NewResponse(&agentv1.ConfigureResponse{}), nil
}

func (a *Agent) configureOnce(m *agentv1.ConfigureRequest) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.configured != nil {
		if !sameIdentity(a.configured, m) {
			return errdefs.New(errdefs.WrongState, "configure: the machine was told otherwise since it booted; restart it")
		}
		return nil
	}
	if a.cfg.Refusal != nil {
		return a.cfg.Refusal
	}
	if err := a.configure(m); err != nil {
		return err
	}
	a.configured = m
	return nil
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
		a.GetOnBoot() == b.GetOnBoot() && proto.Equal(a.GetOnBootCommand(), b.GetOnBootCommand()) &&
		strings.Join(a.GetTmpfs(), "\x00") == strings.Join(b.GetTmpfs(), "\x00")
}

func (a *Agent) configure(m *agentv1.ConfigureRequest) error {
	if err := a.tellKernel(m); err != nil {
		return err
	}
	if a.cfg.Init {
		for _, p := range m.GetTmpfs() {
			if err := filesystems.MountTmpfs(p); err != nil {
				return err
			}
		}
	}
	if err := a.writeNames(m); err != nil {
		return err
	}
	a.bringUp(m.GetNetwork())
	program := onBootProgram(m)
	switch {
	case a.cfg.System != nil:
		return a.cfg.System.Start(program)
	case program == nil:
		return nil
	}
	return onboot.Start(onboot.Config{
		Commands: a.commands, World: a.cfg.World, Console: a.cfg.Console, Log: a.cfg.Log, Group: &a.onBoot,
	}, *program)
}

// onBootProgram is what runs at boot; nil for nothing.
func onBootProgram(m *agentv1.ConfigureRequest) *command.Spec {
	switch c := m.GetOnBootCommand(); {
	case c != nil:
		return &command.Spec{Argv: c.GetArgv(), Env: c.GetEnv(), Dir: c.GetCwd(), User: c.GetUser()}
	case m.GetOnBoot() != "":
		return &command.Spec{Argv: []string{"/bin/sh", "-c", m.GetOnBoot()}}
	}
	return nil
}
