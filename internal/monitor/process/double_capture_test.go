//go:build linux

package process_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Platform is that of machine.Hypervisor.
func (double) Platform(context.Context, machine.RunConfig) (machine.Platform, error) {
	return machine.Platform{Hypervisor: "double"}, nil
}

// doubleMemory is the file guest-memory in the run's folder, over the memory
// file of a run that continues; what a test writes there the guest has written.
type doubleMemory struct {
	cfg  machine.RunConfig
	seen []byte
}

// Memory is that of machine.Run.
func (r *doubleRun) Memory(context.Context) (machine.Memory, error) {
	if has(r.cfg.Dir, "memory-fails") {
		return nil, errdefs.New(errdefs.Unsupported, "full checkpoints: ptrace is forbidden; allow it")
	}
	event(r.cfg.Dir, "memory")
	return &doubleMemory{cfg: r.cfg}, nil
}

func (m *doubleMemory) content() []byte {
	b := make([]byte, m.cfg.MemoryBytes)
	if m.cfg.Incoming != nil {
		base, err := os.ReadFile(m.cfg.Incoming.MemoryFile)
		if err != nil {
			panic(err)
		}
		copy(b, base)
	}
	own, _ := os.ReadFile(filepath.Join(m.cfg.Dir, "guest-memory"))
	for at := 0; at < len(own); at += dirty.PageSize {
		if page := own[at : at+dirty.PageSize]; !bytes.Equal(page, make([]byte, dirty.PageSize)) {
			copy(b[at:], page)
		}
	}
	return b
}

func (m *doubleMemory) Strategy() dirty.Strategy { return dirty.Userfaultfd }

func (m *doubleMemory) differing(from []byte) *dirty.Set {
	set, now := dirty.NewSet(m.cfg.MemoryBytes), m.content()
	for at := 0; at < len(now); at += dirty.PageSize {
		if !bytes.Equal(now[at:at+dirty.PageSize], from[at:at+dirty.PageSize]) {
			set.Add(int64(at/dirty.PageSize), 1)
		}
	}
	m.seen = now
	return set
}

func (m *doubleMemory) Arm() (*dirty.Set, error) {
	event(m.cfg.Dir, "arm")
	base := &doubleMemory{cfg: m.cfg}
	base.cfg.Dir = "/nonexistent"
	return m.differing(base.content()), nil
}

func (m *doubleMemory) Scan() (*dirty.Set, error) {
	if has(m.cfg.Dir, "scan-fails") {
		return nil, errors.New("scan does not work")
	}
	return m.differing(m.seen), nil
}

func (m *doubleMemory) ReadAt(b []byte, off int64) (int, error) {
	return bytes.NewReader(m.content()).ReadAt(b, off)
}

func (m *doubleMemory) Close() error { return nil }

// Window is that of machine.Run. Files in the folder make it fail, or the
// monitor die in it.
func (r *doubleRun) Window(ctx context.Context, w machine.Window) (times machine.WindowTimes, err error) {
	event(r.cfg.Dir, "window stay=%t was=%t", w.StayPaused, w.WasPaused)
	if has(r.cfg.Dir, "window-unsupported") {
		return times, errdefs.New(errdefs.Unsupported, "this hypervisor cannot save devices")
	}
	if err := r.Pause(ctx); err != nil {
		return times, err
	}
	if has(r.cfg.Dir, "die-in-window") {
		_ = os.Remove(filepath.Join(r.cfg.Dir, "die-in-window"))
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	if has(r.cfg.Dir, "window-unknown") {
		return times, errdefs.New(errdefs.OutcomeUnknown, "the hypervisor does not say whether it runs")
	}
	err = w.Pages(ctx)
	if err == nil && has(r.cfg.Dir, "window-fails") {
		err = errors.New("the devices cannot be saved")
	}
	if err == nil {
		_, err = w.State.WriteString("devices")
	}
	if err == nil {
		_, err = r.call(ctx, "switch", w.Top.ID)
	}
	if err != nil && !w.WasPaused || err == nil && !w.WasPaused && !w.StayPaused {
		err = errors.Join(err, r.Resume(ctx))
	}
	return machine.WindowTimes{Downtime: time.Millisecond}, err
}
