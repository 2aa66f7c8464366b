//go:build linux

package qemu

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/process"
)

// keep keeps a run that was tracked by c from its beginning, and switches its
// disk to top.
func (b *bench) keep(t testing.TB, r machine.Run, c *copier, top machine.Layer) machine.Incoming {
	t.Helper()
	devices := filepath.Join(t.TempDir(), "devices")
	f := stateFile(t, devices)
	defer f.Close()
	must(t, c.copy(c.memory.Scan()))
	_, err := r.Window(ctxOf(t), machine.Window{
		State: f, Top: &top, Pages: func(context.Context) error { return c.copy(c.memory.Scan()) },
	})
	must(t, err)
	return machine.Incoming{MemoryFile: c.file.Name(), DeviceState: devices, Checkpoint: "k"}
}

// next is the configuration of a run that continues from what was kept of one of cfg.
func (b *bench) next(t testing.TB, cfg machine.RunConfig, in machine.Incoming) machine.RunConfig {
	t.Helper()
	next := b.config(t)
	next.CPUs, next.MemoryBytes, next.Incoming = cfg.CPUs, cfg.MemoryBytes, &in
	next.Disk = append(append([]machine.Layer(nil), cfg.Disk...), b.overlay(t))
	return next
}

func TestGuestContinues(t *testing.T) {
	b := newBench(t)
	cfg := b.guest(t)(t)
	r := b.launch(t, cfg)
	c := newCopier(t, r, filepath.Join(b.dir, "memory"), cfg.MemoryBytes)
	must(t, c.copy(c.memory.Arm()))
	must(t, r.Resume(ctxOf(t)))
	k := dialGuest(t, r)
	k.want("ok", "dirty 20")
	k.want("ok", "remember kept")
	k.want("ok", "write 1 first")
	in := b.keep(t, r, c, b.overlay(t))
	k.want("kept", "recall")
	k.want("ok", "write 1 second")
	k.want("ok", "remember later")

	child := b.next(t, cfg, in)
	next := b.launch(t, child)
	for _, path := range []string{in.MemoryFile, filepath.Join(cfg.Dir, memoryFile)} {
		for _, pid := range []int{r.Process().PID, next.Process().PID} {
			for _, flags := range openFiles(t, pid, path) {
				if flags != "0" {
					t.Errorf("process %d has %s open with %s, want read-only", pid, path, flags)
				}
			}
		}
	}
	if now, before := generation(t, next), generation(t, r); now == before || now == "" {
		t.Errorf("the VM generation id was %q and is %q", before, now)
	}
	must(t, next.Resume(ctxOf(t)))
	n := dialGuest(t, next)
	n.want("kept", "recall")
	n.want("text first", "read 1")
	n.want("virtio_rng.0", "random")
	n.want("ok", "write 2 third")
	k.want("text", "read 2")
	k.want("text second", "read 1")
	k.want("later", "recall")
	checkProcess(t, cfg, next.Process().PID)
	must(t, k.conn.Close())
	n.say("poweroff")
	awaitExit(t, next, machine.GuestShutdown)
	_ = n.conn.Close()
	if got := contents(t, child.Disk, 1) + " " + contents(t, child.Disk, 2); got != "first third" {
		t.Errorf("the child's disk shows %q", got)
	}
	t.Run("reboot", func(t *testing.T) {
		next := b.launch(t, b.next(t, cfg, in))
		must(t, next.Resume(ctxOf(t)))
		n := dialGuest(t, next)
		n.say("reboot")
		awaitExit(t, next, machine.GuestReset)
		_ = n.conn.Close()
	})
}

// generation is the id by which a guest's kernel sees that it is another machine.
func generation(t *testing.T, r machine.Run) string {
	t.Helper()
	var answer struct{ GUID string }
	must(t, r.(*run).execute(ctxOf(t), "ask", "query-vm-generation-id", nil, &answer))
	return answer.GUID
}

// A guest that powers off while a window opens and closes ends its run as one
// that has shut down, and no window is left open.
func TestGuestEndsAmongWindows(t *testing.T) {
	b := newBench(t)
	config := b.guest(t)
	for command, reason := range map[string]machine.ExitReason{"poweroff": machine.GuestShutdown, "reboot": machine.GuestReset} {
		r := b.launch(t, config(t))
		must(t, r.Resume(ctxOf(t)))
		k := dialGuest(t, r)
		k.say("%s", command)
		for {
			if _, err := b.window(t, ctxOf(t), r, nil); err != nil {
				if !errdefs.Is(err, errdefs.WrongState) {
					t.Errorf("window amid %s: %v", command, err)
				}
				break
			}
		}
		awaitExit(t, r, reason)
		_ = k.conn.Close()
	}
}

// A disk that another process has open is not written to, although QEMU
// calls such a load complete.
func TestContinueOnABusyDisk(t *testing.T) {
	b := newBench(t)
	cfg := b.config(t)
	r := b.launch(t, cfg)
	c := newCopier(t, r, filepath.Join(b.dir, "memory"), cfg.MemoryBytes)
	must(t, c.copy(c.memory.Arm()))
	must(t, r.Resume(ctxOf(t)))
	top := b.overlay(t)
	next := b.next(t, cfg, b.keep(t, r, c, top))
	next.Disk[len(next.Disk)-1] = top
	if _, err := b.q.Launch(ctxOf(t), next); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("launch on a disk in use: %v", err)
	}
}

func TestSuccessorsMayTrace(t *testing.T) {
	b := newBench(t)
	r := b.launch(t, b.config(t))
	scope := filepath.Join(b.dir, "scope")
	for _, text := range []string{"0\n", "1\n", "2\n"} {
		must(t, os.WriteFile(scope, []byte(text), 0o600))
		must(t, process.LetSuccessorsTrace(ctxOf(t), scope, r.Process().PID))
		must(t, r.Resume(ctxOf(t)))
		must(t, r.Pause(ctxOf(t)))
	}
	must(t, r.Kill(ctxOf(t)))
	must(t, os.WriteFile(scope, []byte("1\n"), 0o600))
	if err := process.LetSuccessorsTrace(ctxOf(t), scope, r.Process().PID); err == nil {
		t.Error("nothing was permitted to a process that has ended, and no error")
	}
}

func TestWindowOutlivesItsDeadline(t *testing.T) {
	b := newBench(t)
	r := b.launch(t, b.config(t))
	must(t, r.Resume(ctxOf(t)))

	// The pages take too long: the vCPUs do not wait for them.
	ctx, cancel := contextFor(t, 200*time.Millisecond)
	defer cancel()
	_, err := b.window(t, ctx, r, func(ctx context.Context) error {
		<-ctx.Done()
		for {
			running, err := r.Running(ctxOf(t))
			if err != nil || running {
				return err
			}
		}
	})
	if !errdefs.Is(err, errdefs.Deadline) {
		t.Errorf("window with endless pages: %v", err)
	}

	// QEMU itself takes too long.
	ctx, cancel = context.WithCancel(ctxOf(t))
	defer cancel()
	_, err = b.window(t, ctx, r, func(context.Context) error {
		cancel()
		return unix.Kill(r.Process().PID, unix.SIGSTOP)
	})
	if !errdefs.Is(err, errdefs.OutcomeUnknown) {
		t.Errorf("window of a stopped process: %v", err)
	}
	must(t, unix.Kill(r.Process().PID, unix.SIGCONT))
	// Whatever changes the run comes after the vCPUs were let go.
	must(t, r.Pause(ctxOf(t)))
	must(t, r.Resume(ctxOf(t)))
	_, err = b.window(t, ctxOf(t), r, func(context.Context) error { return nil })
	must(t, err)
	if running, err := r.Running(ctxOf(t)); err != nil || !running {
		t.Errorf("running is %v, %v", running, err)
	}
	must(t, unix.Kill(r.Process().PID, unix.SIGSTOP))
	ctx, cancel = contextFor(t, 100*time.Millisecond)
	defer cancel()
	if _, err := b.window(t, ctx, r, nil); !errdefs.Is(err, errdefs.Deadline) {
		t.Errorf("window that never opened: %v", err)
	}
	must(t, r.Kill(ctxOf(t)))
}

// Close and Kill do not wait for a window that nobody can end.
func TestCloseAfterAWindowWithoutEnd(t *testing.T) {
	b := newBench(t)
	cfg := b.config(t)
	r := b.launch(t, cfg)
	must(t, r.Resume(ctxOf(t)))
	ctx, cancel := context.WithCancel(ctxOf(t))
	_, err := b.window(t, ctx, r, func(context.Context) error {
		cancel()
		return unix.Kill(r.Process().PID, unix.SIGSTOP)
	})
	if !errdefs.Is(err, errdefs.OutcomeUnknown) {
		t.Errorf("window of a stopped process: %v", err)
	}
	must(t, r.Close())
	must(t, unix.Kill(r.Process().PID, unix.SIGCONT))
	next, err := b.q.Adopt(ctxOf(t), cfg, r.Process())
	must(t, err)
	must(t, next.Resume(ctxOf(t)))
	_, err = b.window(t, ctxOf(t), next, nil)
	must(t, err)
	must(t, next.Kill(ctxOf(t)))
	must(t, next.Close())
}

// window is one that switches the disk and keeps nothing.
func (b *bench) window(t testing.TB, ctx context.Context, r machine.Run, pages func(context.Context) error) (machine.WindowTimes, error) {
	t.Helper()
	if pages == nil {
		pages = func(context.Context) error { return nil }
	}
	f := stateFile(t, filepath.Join(t.TempDir(), "devices"))
	defer f.Close()
	top := b.overlay(t)
	return r.Window(ctx, machine.Window{State: f, Top: &top, Pages: pages})
}
