package machinetest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Platform is that of every fake run of the shape.
func (f *Fake) Platform(_ context.Context, cfg machine.RunConfig) (machine.Platform, error) {
	p := machine.Platform{
		Hypervisor: "fake-1", MachineType: "fake-1.0", CPU: "fake", Accelerator: cfg.Accelerator,
		MemoryBytes: cfg.MemoryBytes, CPUs: cfg.CPUs, Devices: []string{"disk", "link"}, Network: machine.NetworkNone,
	}
	if text, ok := readFault(f.spec(cfg), "platform"); ok {
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			return p, fmt.Errorf("read fault platform: %w", err)
		}
	}
	return p, nil
}

// callLimit bounds what has no context.
const callLimit = 10 * time.Second

// fakeMemory is the guest's memory seen from outside.
type fakeMemory struct {
	run      *fakeRun
	strategy dirty.Strategy
	closed   atomic.Bool
}

// Memory looks into the fake guest's memory.
func (r *fakeRun) Memory(ctx context.Context) (machine.Memory, error) {
	if _, err := r.call(ctx, request{Op: "status"}); err != nil {
		return nil, err
	}
	if text, ok := readFault(r.spec, "memory-unsupported"); ok {
		return nil, errdefs.New(errdefs.Unsupported, "look into the memory of run %s: %s", r.cfg.RunID, text)
	}
	m := &fakeMemory{run: r, strategy: dirty.Userfaultfd}
	if text, ok := readFault(r.spec, "memory-strategy"); ok {
		m.strategy = dirty.Strategy(text)
	}
	return m, nil
}

func (m *fakeMemory) Strategy() dirty.Strategy { return m.strategy }

func (m *fakeMemory) Arm() (*dirty.Set, error) { return m.pages("arm") }

func (m *fakeMemory) Scan() (*dirty.Set, error) {
	if m.strategy == dirty.Untracked {
		return m.pages("arm")
	}
	return m.pages("scan")
}

// call asks the machine's process.
func (m *fakeMemory) call(req request) (answer, error) {
	if m.closed.Load() {
		return answer{}, errdefs.New(errdefs.WrongState, "%s memory of run %s: it was closed", req.Op, m.run.cfg.RunID)
	}
	if text, ok := readFault(m.run.spec, "memory-fails"); ok {
		return answer{}, errdefs.New(errdefs.Internal, "%s memory of run %s: %s", req.Op, m.run.cfg.RunID, text)
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	return m.run.call(ctx, req)
}

func (m *fakeMemory) pages(op string) (*dirty.Set, error) {
	awaitGone(faultPath(m.run.spec, "memory-waits"))
	if !m.strategy.Live() {
		if a, err := m.call(request{Op: "status"}); err != nil {
			return nil, err
		} else if a.Running {
			return nil, errdefs.New(errdefs.WrongState, "%s memory of run %s: it runs, and %s cannot be used so", op, m.run.cfg.RunID, m.strategy)
		}
	}
	a, err := m.call(request{Op: op})
	if err != nil {
		return nil, err
	}
	set := dirty.NewSet(m.run.cfg.MemoryBytes)
	for _, r := range a.Pages {
		set.Add(r.First, r.Count)
	}
	return set, nil
}

// ReadAt reads what the guest's memory is now.
func (m *fakeMemory) ReadAt(p []byte, off int64) (int, error) {
	n := int(min(int64(len(p)), m.run.cfg.MemoryBytes-off))
	if off < 0 || n < 0 {
		return 0, errdefs.New(errdefs.Invalid, "read memory of run %s: offset %d is not in it", m.run.cfg.RunID, off)
	}
	a, err := m.call(request{Op: "read", Offset: off, Length: int64(n)})
	if err != nil {
		return 0, err
	}
	clear(p[copy(p[:n], a.Data):n])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (m *fakeMemory) Close() error {
	m.closed.Store(true)
	return nil
}
