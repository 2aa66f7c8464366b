package script_test

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdpoint/holdpoint/internal/cli"
	"github.com/holdpoint/holdpoint/internal/cli/launch"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest"
	"github.com/holdpoint/holdpoint/internal/serve"
)

// faultsVariable tells the processes where a session's faults are.
const faultsVariable = "HOLDPOINT_FAKE_FAULTS"

// TestMain is also the main of the binary that the scripts run, and of all the
// processes that it starts by its own path.
func TestMain(m *testing.M) {
	machinetest.FakeMain()
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-test.") {
		os.Exit(holdpoint())
	}
	testscript.Main(m, map[string]func(){"holdpoint": func() { os.Exit(holdpoint()) }})
}

// version is that of the binary.
const version = "test"

// holdpoint is cmd/holdpoint with the fake hypervisor.
func holdpoint() int {
	faults := os.Getenv(faultsVariable)
	return cli.Main(cli.Config{
		Version: version,
		RunDaemon: func(ctx context.Context, run cli.DaemonRun) error {
			return serve.Daemon(ctx, serve.DaemonConfig{
				Home: run.Home, Host: fakeHost{faults: faults},
				MonitorCommand: []string{run.Executable, "monitor", run.Home.Dir()},
				Build:          run.Build, Ready: run.Ready, Log: run.Log,
			})
		},
		RunMonitor: func(ctx context.Context, args []string) error {
			return serve.Monitor(ctx, serve.MonitorConfig{
				Hypervisor: machinetest.NewFake(machinetest.FakeConfig{Faults: faults}), HypervisorVersion: "fake",
				Build: launch.Build(version), Dir: args[1],
			})
		},
	})
}

// thisProgram is this program's path.
func thisProgram() string {
	path, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return path
}
