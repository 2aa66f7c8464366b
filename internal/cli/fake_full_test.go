package cli_test

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
)

// fullCheckpoint is 4, "green", verified and with a pool, or 5, which has
// failed.
func fullCheckpoint(n int) *holdpointv1.Checkpoint {
	c := checkpoint(3)
	c.Id, c.Kind, c.Consistency, c.Parent, c.Current = fmt.Sprintf("c%d000000000000aa", n), "full", "", "c3000000000000aa", false
	c.CreatedAt = ago(time.Duration(60-n)*time.Minute + time.Second)
	c.MemoryBytes, c.MemoryLayers, c.Tracking = 21<<20, []string{"m1", "m2"}, "userfaultfd"
	c.Platform = `{"hypervisor":"7.2","machine_type":"pc-q35-7.2","cpu":"qemu64-v1,ssse3=on,aes=on","accelerator":"tcg"}`
	c.Name, c.Message, c.Verification, c.Pool, c.Standbys = "green", "tests green", "verified", 4, 3
	if n == 5 {
		c.Name, c.Message, c.Verification, c.Problem, c.Pool, c.Standbys = "broken", "", "failed", "layer m2:\ndigest differs", 0, 0
	}
	return c
}

func fullResult() *holdpointv1.CheckpointResult {
	return &holdpointv1.CheckpointResult{
		Checkpoint: fullCheckpoint(4), DowntimeMs: 9.8, ReturnMs: 61, DurableMs: 130, MemoryBytes: 21 << 20, DiskBytes: 6 << 20,
		PrecopyMs: 45, PrecopyRounds: 2, PrecopiedBytes: 12 << 20, WindowStopMs: 2.6, WindowDevicesMs: 3.1, WindowSwitchMs: 2, WindowPagesMs: 0.8,
		WindowResumeMs: 1.5, WindowBytes: 1200 << 10, PrepareMs: 12, SyncDiskMs: 2, CaptureMs: 68, EncodeMs: 40, PublishMs: 10,
	}
}

func (s *fakeMachines) Suspend(_ context.Context, r *connect.Request[holdpointv1.SuspendMachineRequest]) (*connect.Response[holdpointv1.Operation], error) {
	m := machine("web")
	m.State = "suspended"
	return s.f.operation(r.Msg, "suspend", "web", &holdpointv1.OperationResult{Machine: m, Checkpoint: fullResult()})
}

func (s *fakeMachines) Fork(_ context.Context, r *connect.Request[holdpointv1.ForkRequest]) (*connect.Response[holdpointv1.Operation], error) {
	if r.Msg.GetCheckpoint() == "web" {
		return nil, notFound("checkpoint", "web")
	}
	result := &holdpointv1.OperationResult{Forks: s.f.forks}
	if r.Msg.GetCheckpoint() == "" {
		result.Checkpoint = fullResult()
	}
	for i := uint32(1); s.f.forks == nil && i <= r.Msg.GetCount(); i++ {
		result.Forks = append(result.Forks, forked(i))
	}
	return s.f.operation(r.Msg, "fork", "web", result)
}

// forked is a machine of a fork.
func forked(index uint32) *holdpointv1.ForkResult {
	m := machine(fmt.Sprintf("try-%d", index))
	m.Id = fmt.Sprintf("f%d00000000000000", index)
	return &holdpointv1.ForkResult{Name: m.GetName(), Machine: m, Index: index, ReadyMs: 100 * float64(index)}
}

func (s *fakeCheckpoints) Verify(_ context.Context, r *connect.Request[holdpointv1.VerifyCheckpointRequest]) (*connect.Response[holdpointv1.Operation], error) {
	return s.f.operation(r.Msg, "checkpoint verify", "web", &holdpointv1.OperationResult{Verify: &holdpointv1.VerifyResult{
		Checkpoint: fullCheckpoint(4), Layers: 4, Bytes: 90 << 20, Restored: true,
	}})
}

func (s *fakeCheckpoints) SetPool(_ context.Context, r *connect.Request[holdpointv1.SetPoolRequest]) (*connect.Response[holdpointv1.Operation], error) {
	c := fullCheckpoint(4)
	c.Pool, c.Standbys = r.Msg.GetCount(), r.Msg.GetCount()
	return s.f.operation(r.Msg, "checkpoint pool", "web", &holdpointv1.OperationResult{Checkpoint: &holdpointv1.CheckpointResult{Checkpoint: c}})
}
