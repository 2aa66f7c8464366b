package script_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdpoint/holdpoint/internal/cli"
	"github.com/holdpoint/holdpoint/internal/cli/launch"
	"github.com/holdpoint/holdpoint/internal/home"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest"
	"github.com/holdpoint/holdpoint/internal/serve"
	"github.com/holdpoint/holdpoint/internal/serve/qemuhost"
)

const (
	// faultsVariable tells the processes where a session's faults are.
	faultsVariable = "HOLDPOINT_FAKE_FAULTS"
	// realVariable makes holdpoint, and all that it starts, the real one.
	realVariable = "HOLDPOINT_REAL_HOST"
)

// TestMain is also the main of the binary that the scripts run, and of all the
// processes that it starts by its own path.
func TestMain(m *testing.M) {
	machinetest.FakeMain()
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-test.") {
		if filepath.Base(os.Args[0]) == bare {
			becomeBare()
		}
		os.Exit(holdpoint())
	}
	testscript.Main(m, map[string]func(){
		"holdpoint": func() { os.Exit(holdpoint()) },
		bare:        func() { becomeBare(); os.Exit(holdpoint()) },
	})
}

// bare is the real holdpoint on a host where no program is installed but those
// in the folder that bareVariable names, if any.
const (
	bare         = "holdpoint-bare"
	bareVariable = "BARE_PATH"
)

func becomeBare() {
	for name, value := range map[string]string{realVariable: "1", "PATH": os.Getenv(bareVariable)} {
		if err := os.Setenv(name, value); err != nil {
			panic(err)
		}
	}
}

// version is that of the binary.
const version = "test"

// holdpoint is cmd/holdpoint with the fake hypervisor, unless the real host is
// asked for.
func holdpoint() int {
	if os.Getenv(realVariable) != "" {
		return cli.Main(realConfig())
	}
	faults := os.Getenv(faultsVariable)
	return cli.Main(cli.Config{
		Version: version,
		RunDaemon: func(ctx context.Context, run cli.DaemonRun) error {
			return serve.Daemon(ctx, serve.DaemonConfig{
				Home: run.Home, Host: fakeHost{faults: faults},
				MonitorCommand: []string{run.Executable, "monitor", run.Home.Dir()},
				Build:          run.Build, Ready: run.Ready, Log: run.Log, Files: stepFaults(faults, "daemon"),
			})
		},
		RunMonitor: func(ctx context.Context, args []string) error {
			return serve.Monitor(ctx, serve.MonitorConfig{
				Files:      stepFaults(faults, "monitor"),
				Hypervisor: machinetest.NewFake(machinetest.FakeConfig{Faults: faults}), HypervisorVersion: "fake",
				Build: launch.Build(version), Dir: args[1],
			})
		},
	})
}

// realConfig is that of cmd/holdpoint.
func realConfig() cli.Config {
	hostConfig := func(h *home.Home) qemuhost.Config { return qemuhost.Config{Home: h, Log: slog.Default()} }
	return cli.Config{
		Version: version,
		RunDaemon: func(ctx context.Context, run cli.DaemonRun) error {
			return serve.Daemon(ctx, serve.DaemonConfig{
				Home: run.Home, Host: qemuhost.New(hostConfig(run.Home)),
				MonitorCommand: []string{run.Executable, "monitor", run.Home.Dir()},
				Build:          run.Build, Ready: run.Ready, Log: run.Log,
			})
		},
		RunMonitor: func(ctx context.Context, args []string) error {
			h, err := home.Open(args[0])
			if err != nil {
				return err
			}
			hypervisor, qemuVersion := qemuhost.Hypervisor(ctx, hostConfig(h))
			return serve.Monitor(ctx, serve.MonitorConfig{
				Hypervisor: hypervisor, HypervisorVersion: qemuVersion, Build: launch.Build(version), Dir: args[1],
			})
		},
	}
}

// thisProgram is this program's path.
func thisProgram() string {
	path, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return path
}
