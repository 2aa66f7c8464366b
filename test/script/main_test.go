package script_test

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdpoint/holdpoint/internal/cli"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest"
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

// holdpoint is cmd/holdpoint with the fake hypervisor.
func holdpoint() int {
	return cli.Main(cli.Config{
		Version: "test",
		RunDaemon: func(ctx context.Context, run cli.DaemonRun) error {
			return nil
		},
		RunMonitor: func(ctx context.Context, args []string) error {
			return nil
		},
	})
}

// binary is this program's path.
func binary() string {
	path, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return path
}
