package machinetest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakedisk"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest/fakememory"
)

// devicesVersion is that of deviceState.
const devicesVersion = "holdpoint fake devices 1"

// deviceState is the fake's state of CPUs and devices, as JSON. Memory and
// Disk are digests of what belongs to it: what is not of one instant is not
// loaded, where a real guest would crash.
type deviceState struct {
	Version     string
	MemoryBytes int64
	CPUs        int
	Memory      string
	Disk        string
	// Clock is the guest's time.
	Clock time.Time
}

// devices takes the state; the vCPUs stand still.
func (m *fakeMachine) devices() ([]byte, error) {
	if m.running {
		return nil, errdefs.New(errdefs.WrongState, "the run is not paused")
	}
	image, err := m.memory.now()
	if err != nil {
		return nil, err
	}
	disk, err := m.disk.Digest()
	if err != nil {
		return nil, err
	}
	return json.Marshal(deviceState{
		Version: devicesVersion, MemoryBytes: m.spec.Run.MemoryBytes, CPUs: m.spec.Run.CPUs,
		Memory: digest(image), Disk: disk, Clock: m.clock.now(),
	})
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// load makes the disk and the memory what the run continues with, if it does.
func (m *fakeMachine) load() error {
	cfg := m.spec.Run
	kept := fakememory.Kept{BootID: cfg.RunID, Cmdline: cfg.Cmdline, Paths: []string{"run", "dev/shm"}}
	var image fakememory.Image
	if cfg.Incoming != nil {
		if text, ok := m.fault("incoming-fails"); ok {
			return errdefs.New(errdefs.Storage, "load memory and devices: %s", text)
		}
		var err error
		if image, err = m.openMemory(); err != nil {
			return damaged(err)
		}
		kept = image.Kept()
	}
	var chain []string
	for _, l := range cfg.Disk {
		chain = append(chain, l.Path)
	}
	m.disk = fakedisk.Disk{Root: rootDir(cfg), Memory: kept.Paths}
	if err := m.disk.Load(chain); err != nil {
		return err
	}
	m.memory = &guestMemory{root: m.disk.Root, kept: kept, file: image.Bytes}
	if cfg.Incoming == nil {
		return nil
	}
	if err := m.loadDevices(image); err != nil {
		return damaged(err)
	}
	return image.Restore(m.disk.Root)
}

// damaged gives the kind to what keeps a run from continuing.
func damaged(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.As(errdefs.NotFound, err)
	}
	return errdefs.As(errdefs.Storage, err)
}

// openMemory reads the memory file of a run that continues. It stays open as
// long as the run lives, as a mapping does.
func (m *fakeMachine) openMemory() (fakememory.Image, error) {
	cfg := m.spec.Run
	f, err := os.OpenFile(cfg.Incoming.MemoryFile, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fakememory.Image{}, fmt.Errorf("open memory file: %w", err)
	}
	m.memoryFile = f
	info, err := f.Stat()
	if err != nil {
		return fakememory.Image{}, fmt.Errorf("open memory file: %w", err)
	}
	if info.Size() != cfg.MemoryBytes {
		return fakememory.Image{}, fmt.Errorf("open memory file %q: it has %d bytes, the machine %d", f.Name(), info.Size(), cfg.MemoryBytes)
	}
	return fakememory.Decode(f)
}

// loadDevices checks the state of the devices against all else.
func (m *fakeMachine) loadDevices(image fakememory.Image) error {
	cfg := m.spec.Run
	data, err := os.ReadFile(cfg.Incoming.DeviceState)
	if err != nil {
		return fmt.Errorf("load devices: %w", err)
	}
	var s deviceState
	if json.Unmarshal(data, &s) != nil || s.Version != devicesVersion {
		return errors.New("load devices: it is no device state")
	}
	disk, err := m.disk.Digest()
	switch {
	case err != nil:
		return err
	case s.MemoryBytes != cfg.MemoryBytes || s.CPUs != cfg.CPUs:
		return fmt.Errorf("load devices: they are of a machine with %d bytes and %d CPUs", s.MemoryBytes, s.CPUs)
	case s.Memory != digest(image.Bytes):
		return errors.New("load devices: they and the memory are not of one instant")
	case s.Disk != disk:
		return errors.New("load devices: they and the disk are not of one instant")
	}
	m.clock.stopped = s.Clock
	return nil
}

// windowFault makes a step of a window fail, hang, or be the last one.
func (m *fakeMachine) windowFault(step string) error {
	if text, ok := m.fault("window-dies"); ok && text == step {
		os.Exit(1)
	}
	if text, ok := m.fault("window-waits"); ok && text == step {
		awaitGone(m.faultPath("window-waits"))
	}
	return stepFails(m.spec, step)
}

// stepFails is the error of the fault window-fails for the step.
func stepFails(spec fakeSpec, step string) error {
	text, _ := readFault(spec, "window-fails")
	if at, why, _ := strings.Cut(text, " "); at == step {
		return errdefs.New(errdefs.Internal, "%s: %s", step, why)
	}
	return nil
}
