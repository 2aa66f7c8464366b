package machines

import (
	"context"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/cli/app"
	"github.com/holdpoint/holdpoint/internal/cli/view"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Stats is what stats prints.
type Stats struct {
	view.Header
	Machines []Usage `json:"machines"`
}

// Usage is what one machine uses.
type Usage struct {
	Name             string  `json:"name"`
	ID               string  `json:"id"`
	State            string  `json:"state"`
	CPUPercent       float64 `json:"cpu_percent" doc:"CPU time while this was measured; 100 is one CPU of the host"`
	MemoryBytes      int64   `json:"memory_bytes" doc:"the host's memory that it shares with no other machine, swap included"`
	GuestMemoryBytes int64   `json:"guest_memory_bytes" doc:"what its kernel has; 0 where silent says why"`
	GuestUsedBytes   int64   `json:"guest_used_bytes" doc:"what of that programs could not get"`
	DiskBytes        int64   `json:"disk_bytes" doc:"its disk on the host, without the image; what it shares with checkpoints and forks is counted for each"`
	ReceivedBytes    int64   `json:"received_bytes" doc:"over its network since its kernel booted"`
	SentBytes        int64   `json:"sent_bytes"`
	UpMS             int64   `json:"up_ms" doc:"since it answered first, after a start, restore, fork or resume"`
	Silent           string  `json:"silent" doc:"why the machine did not say what it uses itself; empty when it did, and while it does not run"`
}

// NewStats is the verb `stats`.
func NewStats(a *app.App) *cobra.Command {
	return a.Command(app.Verb{
		Use: "stats [MACHINE]", Short: "Show what machines use of CPU, memory, disk and network",
		Long: `Show what a machine uses, or every one, measured for half a second. "MEMORY" is what
the machine has of the host's for itself; pages that forks share are not in it. "IN
USE" is how its own kernel sees it, which waits for no machine that does not answer,
and wakes none that is suspended.`,
		MaxArgs: 1, Object: Stats{}, Kinds: []errdefs.Kind{errdefs.NotFound}, Complete: app.First(a.MachineNames),
		Run: func(ctx context.Context, args []string) error {
			req := &holdpointv1.MachineStatsRequest{}
			if len(args) > 0 {
				if req.Machine = args[0]; req.Machine == "" {
					return errdefs.New(errdefs.Invalid, "stats: the name of the machine is empty")
				}
			}
			return runStats(ctx, a, req)
		},
	})
}

func runStats(ctx context.Context, a *app.App, req *holdpointv1.MachineStatsRequest) error {
	return a.Query(ctx, func(ctx context.Context, c *client.Client) error {
		res, err := c.Machines.Stats(ctx, connect.NewRequest(req))
		if err != nil {
			return err
		}
		o := app.Output{Object: Stats{Header: view.NewHeader(), Machines: view.List(res.Msg.GetMachines(), usageOf)}}
		var rows [][]string
		for _, m := range res.Msg.GetMachines() {
			o.Terse = append(o.Terse, m.GetName())
			rows = append(rows, statsRow(m))
		}
		o.Human = func(w io.Writer) error {
			return view.Table(w, []string{"NAME", "STATE", "CPU", "MEMORY", "IN USE", "DISK", "NET IN", "NET OUT", "UP"}, rows)
		}
		return a.Print(o)
	})
}

func usageOf(m *holdpointv1.MachineStats) Usage {
	return Usage{
		Name: m.GetName(), ID: m.GetId(), State: m.GetState(), CPUPercent: m.GetCpuPercent(), MemoryBytes: m.GetMemoryBytes(),
		GuestMemoryBytes: m.GetGuestMemoryBytes(), GuestUsedBytes: m.GetGuestUsedBytes(), DiskBytes: m.GetDiskBytes(),
		ReceivedBytes: m.GetReceivedBytes(), SentBytes: m.GetSentBytes(), UpMS: m.GetUpMillis(), Silent: m.GetSilent(),
	}
}

func statsRow(m *holdpointv1.MachineStats) []string {
	row := []string{m.GetName(), m.GetState(), "-", "-", "-", view.Size(m.GetDiskBytes()), "-", "-", "-"}
	if m.GetUpMillis() > 0 {
		row[2], row[3] = fmt.Sprintf("%.1f %%", m.GetCpuPercent()), view.Size(m.GetMemoryBytes())
		row[8] = (time.Duration(m.GetUpMillis()) * time.Millisecond).Round(time.Second).String()
	}
	if m.GetGuestMemoryBytes() > 0 {
		row[4] = view.Size(m.GetGuestUsedBytes()) + " of " + view.Size(m.GetGuestMemoryBytes())
		row[6], row[7] = view.Size(m.GetReceivedBytes()), view.Size(m.GetSentBytes())
	}
	return row
}
