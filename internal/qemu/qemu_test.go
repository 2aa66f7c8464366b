//go:build linux

package qemu

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/machine/machinetest"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bench has a real QEMU and disks; its guests are only firmware, which finds
// nothing to boot and waits.
type bench struct {
	t    testing.TB
	dir  string
	q    *QEMU
	disk *disk.Disk
	base machine.Layer
}

func newBench(t testing.TB) *bench {
	t.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip("qemu-system-x86_64 is not installed")
	}
	// Not t.TempDir: sockets need a short path.
	dir, err := os.MkdirTemp("/tmp", "hpq")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	b := &bench{t: t, dir: dir, disk: disk.New(disk.Config{})}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	b.q = New(Config{Host: host.New(host.Config{CacheDir: filepath.Join(dir, "cache"), Logger: log}), Logger: log})
	b.base = machine.Layer{ID: "image", Path: filepath.Join(dir, "root.img"), Format: "raw"}
	f, err := os.OpenFile(b.base.Path, os.O_CREATE|os.O_RDWR, 0o400)
	must(t, err)
	must(t, f.Truncate(64<<20))
	must(t, f.Close())
	return b
}

func (b *bench) overlay(t testing.TB) machine.Layer {
	t.Helper()
	id := durable.NewID()
	l := machine.Layer{ID: id, Path: filepath.Join(b.dir, id+".qcow2"), Format: "qcow2"}
	must(t, b.disk.Create(ctxOf(t), l.Path, 64<<20))
	return l
}

func (b *bench) config(t testing.TB) machine.RunConfig {
	t.Helper()
	id := durable.NewID()
	dir := filepath.Join(b.dir, id)
	must(t, os.Mkdir(dir, 0o700))
	return machine.RunConfig{
		RunID: id, Dir: dir, SocketDir: dir, MachineID: "m", MachineName: "web",
		MemoryBytes: machine.MinMemory, CPUs: 1,
		Disk: []machine.Layer{b.base, b.overlay(t)}, Accelerator: "tcg",
	}
}

func (b *bench) launch(t testing.TB, cfg machine.RunConfig) *run {
	t.Helper()
	r, err := b.q.Launch(ctxOf(t), cfg)
	must(t, err)
	t.Cleanup(func() {
		_ = r.Kill(ctxOf(t)) // it may have ended
		must(t, r.Close())
	})
	return r.(*run)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ctxOf outlives the test, for its clean-up.
func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func awaitExit(t testing.TB, r machine.Run, reason machine.ExitReason) {
	t.Helper()
	select {
	case <-r.Exited():
	case <-time.After(5 * time.Minute):
		t.Fatal("the exit was not proven")
	}
	if r.Exit().Reason != reason {
		t.Fatalf("exit is %+v, want %s", r.Exit(), reason)
	}
}

func TestSuite(t *testing.T) {
	b := newBench(t)
	machinetest.Suite(t, machinetest.Fixture{
		Hypervisor: b.q,
		Config:     func(t *testing.T) machine.RunConfig { return b.config(t) },
		Overlay:    func(t *testing.T) machine.Layer { return b.overlay(t) },
	})
}

// openFiles are the flags with which the process has the file open.
func openFiles(t *testing.T, pid int, path string) (flags []string) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	must(t, err)
	want, err := os.Stat(path) // QEMU opens it by another name
	must(t, err)
	for _, fd := range fds {
		st, err := os.Stat(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		if err != nil || !os.SameFile(st, want) {
			continue
		}
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd.Name()))
		must(t, err)
		var pos, flag string
		_, err = fmt.Sscanf(string(info), "pos: %s\nflags: %s", &pos, &flag)
		must(t, err)
		flags = append(flags, flag[len(flag)-1:])
	}
	return flags
}

func TestSwitchTakesWriteAccessAway(t *testing.T) {
	b := newBench(t)
	cfg := b.config(t)
	r := b.launch(t, cfg)
	first, second := cfg.Disk[1], b.overlay(t)
	if got := openFiles(t, r.Process().PID, first.Path); len(got) != 1 || got[0] != "2" {
		t.Errorf("writable top is open with %v", got)
	}
	must(t, r.SwitchDisk(ctxOf(t), second))
	must(t, r.SwitchDisk(ctxOf(t), second)) // changes nothing
	third := b.overlay(t)
	must(t, r.SwitchDisk(ctxOf(t), third))
	for _, l := range []machine.Layer{b.base, first, second} {
		if got := openFiles(t, r.Process().PID, l.Path); len(got) != 1 || got[0] != "0" {
			t.Errorf("%s is open with %v, want read-only", l.ID, got)
		}
	}
	if got := openFiles(t, r.Process().PID, third.Path); len(got) != 1 || got[0] != "2" {
		t.Errorf("top is open with %v", got)
	}
}

func contextFor(t *testing.T, d time.Duration) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithTimeout(context.Background(), d)
}
