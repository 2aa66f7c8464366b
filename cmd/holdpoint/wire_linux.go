package main

import (
	"context"
	"log/slog"
	"os"

	"github.com/holdpoint/holdpoint/internal/cli"
	"github.com/holdpoint/holdpoint/internal/cli/launch"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/serve"
	"github.com/holdpoint/holdpoint/internal/serve/qemuhost"
)

// acceleratorVariable skips the probe of KVM, for tests: "kvm" or "tcg".
const acceleratorVariable = "HOLDPOINT_ACCEL"

// wire adds the daemon and the monitor.
func wire(cfg *cli.Config) {
	cfg.RunDaemon = func(ctx context.Context, run cli.DaemonRun) error {
		host := qemuhost.New(hostConfig(run.Home))
		return serve.Daemon(ctx, serve.DaemonConfig{
			Home: run.Home, Host: host, MonitorCommand: []string{run.Executable, "monitor", run.Home.Dir()},
			Build: run.Build, Ready: run.Ready, Log: run.Log,
		})
	}
	cfg.RunMonitor = func(ctx context.Context, args []string) error {
		if len(args) != 2 {
			return errdefs.New(errdefs.Invalid, "monitor: give the home and the folder of a run")
		}
		h, err := home.Open(args[0])
		if err != nil {
			return err
		}
		hypervisor, qemuVersion := qemuhost.Hypervisor(ctx, hostConfig(h))
		return serve.Monitor(ctx, serve.MonitorConfig{
			Hypervisor: hypervisor, HypervisorVersion: qemuVersion, Build: launch.Build(version), Dir: args[1],
		})
	}
}

func hostConfig(h *home.Home) qemuhost.Config {
	return qemuhost.Config{Home: h, Accelerator: os.Getenv(acceleratorVariable), Log: slog.Default()}
}
