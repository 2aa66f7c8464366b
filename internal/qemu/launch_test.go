//go:build linux

package qemu

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
	"github.com/holdpoint/holdpoint/internal/qemu/logs"
)

func TestLaunchErrors(t *testing.T) {
	b := newBench(t)
	busy := b.config(t)
	b.launch(t, busy)
	missing := filepath.Join(b.dir, "gone")
	for name, c := range map[string]struct {
		change func(*machine.RunConfig)
		kind   errdefs.Kind
		says   string
	}{
		"no such layer":      {func(c *machine.RunConfig) { c.Disk = []machine.Layer{{ID: "x", Path: missing, Format: "qcow2"}} }, errdefs.NotFound, missing},
		"no such kernel":     {func(c *machine.RunConfig) { c.Kernel = missing }, errdefs.NotFound, "kernel"},
		"disk in use":        {func(c *machine.RunConfig) { c.Disk = busy.Disk }, errdefs.Conflict, "another process"},
		"no disk":            {func(c *machine.RunConfig) { c.Disk = nil }, errdefs.Invalid, "no disk"},
		"raw above":          {func(c *machine.RunConfig) { c.Disk = []machine.Layer{c.Disk[1], c.Disk[0]} }, errdefs.Invalid, "raw"},
		"too much memory":    {func(c *machine.RunConfig) { c.MemoryBytes = 1 << 40 }, errdefs.NoSpace, "--memory"},
		"odd memory":         {func(c *machine.RunConfig) { c.MemoryBytes = 1<<28 + 1 }, errdefs.Invalid, "1 MiB"},
		"accelerator":        {func(c *machine.RunConfig) { c.Accelerator = "xen" }, errdefs.Invalid, "xen"},
		"socket path":        {func(c *machine.RunConfig) { c.SocketDir += strings.Repeat("/x", 50) }, errdefs.Invalid, "HOLDPOINT_HOME"},
		"relative folder":    {func(c *machine.RunConfig) { c.Dir = "x" }, errdefs.Invalid, "absolute"},
		"missing run folder": {func(c *machine.RunConfig) { c.Dir = missing }, errdefs.Internal, missing},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := b.config(t)
			c.change(&cfg)
			r, err := b.q.Launch(ctxOf(t), cfg)
			if err == nil {
				must(t, r.Kill(ctxOf(t)))
			}
			if !errdefs.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error is %v (%s), want %s with %q", err, errdefs.KindOf(err), c.kind, c.says)
			}
			if left, _ := os.ReadDir(cfg.Dir); len(left) != 0 {
				t.Errorf("left %v", left)
			}
		})
	}
	q := New(Config{Host: host.New(host.Config{Binary: "no-such-qemu"})})
	if _, err := q.Launch(ctxOf(t), b.config(t)); !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "qemu-system-x86") {
		t.Errorf("no QEMU: %v", err)
	}
}

func TestTerminatedBySignal(t *testing.T) {
	b := newBench(t)
	r := b.launch(t, b.config(t))
	must(t, unix.Kill(r.Process().PID, unix.SIGTERM))
	awaitExit(t, r, machine.Killed)
	if !strings.Contains(r.Exit().Message, "terminating on signal 15") {
		t.Errorf("exit %+v", r.Exit())
	}
}

func TestLogsStaySmall(t *testing.T) {
	b := newBench(t)
	cfg := b.config(t)
	console := filepath.Join(cfg.Dir, consoleFile)
	must(t, os.WriteFile(console, []byte("of the run before\n"), 0o600))
	b.launch(t, cfg)
	text, err := os.ReadFile(console)
	if err != nil || !bytes.HasPrefix(text, []byte("of the run before\n")) {
		t.Errorf("console log %q, %v: it is appended to", text, err)
	}
	f, err := os.OpenFile(console, os.O_WRONLY|os.O_APPEND, 0)
	must(t, err)
	defer f.Close()
	line := []byte(strings.Repeat("x", 1023) + "\n")
	n, err := logs.Watch(console)
	must(t, err)
	defer n.Close()
	for range logs.Limit/1024 + 10 {
		_, err := f.Write(line)
		must(t, err)
	}
	_, err = f.WriteString("the last line\n")
	must(t, err)
	for { // every truncation is a modification
		text, err := os.ReadFile(console)
		must(t, err)
		// What is kept is written after the truncation, and seen in part until
		// it ends with the last line.
		if len(text) <= logs.Kept && bytes.HasSuffix(text, []byte("the last line\n")) {
			if len(text) < logs.Kept/2 || !bytes.HasPrefix(text, line[:100]) {
				t.Errorf("kept %d bytes, %q … %q", len(text), text[:20], text[len(text)-20:])
			}
			return
		}
		must(t, n.Wait(ctxOf(t)))
	}
}

func TestSilentQEMUDoesNotHangALaunch(t *testing.T) {
	b := newBench(t)
	r := b.launch(t, b.config(t))
	must(t, unix.Kill(r.Process().PID, unix.SIGSTOP))
	start := time.Now()
	ctx, cancel := contextFor(t, 200*time.Millisecond)
	defer cancel()
	if err := r.Pause(ctx); !errdefs.Is(err, errdefs.Deadline) || time.Since(start) > time.Minute {
		t.Errorf("pause of a stopped process: %v after %v", err, time.Since(start))
	}
	must(t, r.Kill(ctxOf(t)))
}

// TestNetworkDeviceStands: QEMU has told itself that nobody is connected to the
// device before the guest can send anything.
func TestNetworkDeviceStands(t *testing.T) {
	b := newBench(t)
	cfg := b.config(t)
	cfg.NIC = true
	r := b.launch(t, cfg)
	events, err := os.ReadFile(filepath.Join(cfg.Dir, eventsOut))
	must(t, err)
	if n := strings.Count(string(events), "NETDEV_STREAM_DISCONNECTED"); n != 1 {
		t.Errorf("the device was let go %d times before the guest ran:\n%s", n, events)
	}
	for range 2 {
		conn, err := r.DialNetwork(ctxOf(t))
		must(t, err)
		must(t, conn.Close())
	}
}
