package main

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/agent"
	"github.com/holdpoint/holdpoint/internal/agent/oom"
	"github.com/holdpoint/holdpoint/internal/agent/system"
)

// beside is the agent's part beside the init of the guest's own disk. A guest
// without it could not be reached any more, so that its end is the guest's.
func beside() error {
	log := newLog(kernelLog{})
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return fmt.Errorf("read kernel command line: %w", err)
	}
	params, err := agent.ParseCmdline(string(line))
	if err != nil {
		return err
	}
	shield, err := oom.NewShield()
	if err != nil {
		return err
	}
	raiseLimits(log)
	init, err := system.Join()
	if err != nil {
		return err
	}
	port := findPort()
	if port == "" {
		return errors.New("the port " + portName + " is gone")
	}
	log.Info("holdpoint-agent is ready")
	err = serve(agent.Config{
		Build: build(), Init: true, System: init, Shield: shield, PowerOff: powerOff, Log: log,
	}, port, params.Magic)
	log.Error("holdpoint-agent ends", "error", err)
	if system.PowerOff() == nil {
		os.Exit(1)
	}
	return err
}

// leave is what process 1 does when systemd has ended everything.
func leave() error {
	verb := ""
	if len(os.Args) > 1 {
		verb = os.Args[1]
	}
	system.Leave(verb)
	return errors.New("the machine cannot be ended")
}

// kernelLog is the kernel's log: the console belongs to the system, which hangs it
// up as it likes.
type kernelLog struct{}

// Write implements io.Writer. What cannot be written has no better place.
func (kernelLog) Write(p []byte) (int, error) {
	f, err := os.OpenFile("/dev/kmsg", os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return len(p), nil
	}
	defer f.Close()
	_, _ = f.WriteString("<6>holdpoint-agent: " + string(p))
	return len(p), nil
}
