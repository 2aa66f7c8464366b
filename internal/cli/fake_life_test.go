package cli_test

import (
	"context"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
)

func (s *fakeMachines) Rename(_ context.Context, r *connect.Request[holdpointv1.RenameMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "rename", "web", &holdpointv1.OperationResult{Machine: machine(r.Msg.GetName())})
}

func (s *fakeMachines) Stats(_ context.Context, r *connect.Request[holdpointv1.MachineStatsRequest]) (*connect.Response[holdpointv1.MachineStatsResponse], error) {
	list := []*holdpointv1.MachineStats{
		{
			Id: "m0123456789abcde", Name: "web", State: "running", CpuPercent: 12.34, MemoryBytes: 150 << 20, GuestMemoryBytes: 480 << 20,
			GuestUsedBytes: 90 << 20, DiskBytes: 6 << 20, ReceivedBytes: 2 << 20, SentBytes: 4096, UpMillis: 7_384_000,
		},
		{Id: "m1", Name: "mute", State: "paused", CpuPercent: 0, MemoryBytes: 80 << 20, DiskBytes: 196 << 10, UpMillis: 61_000, Silent: "it is paused"},
		{Id: "m2", Name: "off", State: "stopped", DiskBytes: 196 << 10},
	}
	if r.Msg.GetMachine() != "" {
		list = list[:1]
	}
	return connect.NewResponse(&holdpointv1.MachineStatsResponse{Machines: list}), nil
}
