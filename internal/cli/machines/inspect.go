package machines

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// NewInspect is the verb `inspect`.
func NewInspect(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "inspect MACHINE", Short: "Show a machine", MinArgs: 1, MaxArgs: 1,
		Object: view.MachineObject{}, Kinds: []errdefs.Kind{errdefs.NotFound}, Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error { return runInspect(ctx, a, args[0]) },
	})
}

func runInspect(ctx context.Context, a *app.App, machine string) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		m, err := app.GetMachine(ctx, c, machine)
		if err != nil {
			return err
		}
		refused := refusals(ctx, c, m)
		return a.Print(app.Output{
			Object: view.MachineObject{Header: view.NewHeader(), Machine: view.MachineOf(m), Refused: refused},
			Terse:  []string{m.GetName()},
			Human: func(w io.Writer) error {
				fields := machineFields(m)
				if refused > 0 {
					fields = append(fields, [2]string{"network refused", fmt.Sprintf("%s; see holdpoint logs %s --network", times(refused), m.GetName())})
				}
				return view.Fields(w, fields)
			},
		})
	})
}

// refusals is how often the machine's network has refused something; 0 where that
// is not known.
func refusals(ctx context.Context, c *client.Client, m *holdpointv1.Machine) uint64 {
	if n := m.GetSpec().GetNetwork(); n == "" || n == "none" || m.GetState() == "stopped" {
		return 0
	}
	resp, err := c.Machines.Network(ctx, connect.NewRequest(&holdpointv1.GetMachineRequest{Machine: m.GetName()}))
	if err != nil {
		return 0 // such as of one that is suspended
	}
	return resp.Msg.GetTotal()
}

func times(n uint64) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

func machineFields(m *holdpointv1.Machine) [][2]string {
	fields := [][2]string{
		{"name", m.GetName()},
		{"id", m.GetId()},
		{"state", m.GetState()},
		{"trouble", m.GetTrouble()},
		{"operation", m.GetOperation()},
		{"image", fmt.Sprintf("%s (%s)", view.Dash(m.GetImage()), view.Short(m.GetImageBuildId()))},
	}
	fields = append(fields, view.SpecFields(m.GetSpec())...)
	fields = append(fields,
		[2]string{"disk file", m.GetDiskPath()},
		[2]string{"created", view.Age(view.TimeOf(m.GetCreatedAt()), time.Now())},
		[2]string{"generation", fmt.Sprint(m.GetGeneration())},
		[2]string{"head", m.GetHead()},
		[2]string{"forked from", m.GetForkedFrom()},
		[2]string{"when it stops", fate(m)},
		[2]string{"layers", fmt.Sprint(m.GetChainLength())},
		[2]string{"run", m.GetRunId()},
		[2]string{"accelerator", m.GetAccelerator()},
		[2]string{"QEMU", m.GetQemuVersion()},
		[2]string{"QEMU pid", pidText(m.GetQemuPid())},
		[2]string{"monitor pid", pidText(m.GetMonitorPid())},
		[2]string{"full checkpoints", m.GetFullCheckpoints()},
		[2]string{"isolated by", strings.Join(m.GetIsolatedBy(), "; ")},
		[2]string{"not isolated", strings.Join(m.GetNotIsolated(), "; ")},
		[2]string{"last run ended", m.GetExit()},
	)
	for _, r := range m.GetRoutes() {
		fields = append(fields, [2]string{"route", fmt.Sprintf("%s → port %d", r.GetUrl(), r.GetPort())})
	}
	return fields
}

// fate says what a stop does besides; "" for nothing.
func fate(m *holdpointv1.Machine) string {
	if m.GetRemoveOnStop() {
		return "it is removed"
	}
	return ""
}

func pidText(pid int64) string {
	if pid == 0 {
		return ""
	}
	return fmt.Sprint(pid)
}
