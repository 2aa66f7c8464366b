//go:build linux

package process_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/process"
	"github.com/holdpoint/holdpoint/internal/qemu"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

// realMonitorMain is the hidden verb with the real hypervisor.
func realMonitorMain(dir string) int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	hv := qemu.New(qemu.Config{Host: host.New(host.Config{}), Logger: log})
	if err := process.Run(context.Background(), process.Config{Dir: dir, Hypervisor: hv, Log: log, Build: "test"}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// newRealBench makes a run of the image in HOLDPOINT_TEST_IMAGE, a folder with
// kernel, initramfs and root.img.
func newRealBench(t *testing.T) *bench {
	t.Helper()
	image := os.Getenv("HOLDPOINT_TEST_IMAGE")
	if image == "" {
		t.Skip("HOLDPOINT_TEST_IMAGE names no folder with kernel, initramfs and root.img")
	}
	b := newBench(t)
	b.start.Args = []string{"real-monitor", b.dir}
	root := machine.Layer{ID: "base", Path: filepath.Join(image, "root.img"), Format: "raw"}
	info, err := os.Stat(root.Path)
	must(t, err)
	top := machine.Layer{ID: "top", Path: filepath.Join(b.dir, "top.qcow2"), Format: "qcow2"}
	must(t, disk.New(disk.Config{}).Create(ctx(t), top.Path, info.Size()))
	run := &b.start.Config.Run
	run.Kernel, run.Initramfs = filepath.Join(image, "kernel"), withAgent(t, b.dir, filepath.Join(image, "initramfs"))
	run.MemoryBytes, run.CPUs, run.Disk = 512<<20, 2, []machine.Layer{root, top}
	run.Cmdline = "rdinit=/init holdpoint.magic=" + link.NewMagic().String()
	b.start.Config.Guest = monitor.Guest{Hostname: "m", MachineID: strings.Repeat("5a", 16), OnBoot: "echo booted >>/root/boots"}
	return b
}

// withAgent is the initramfs with today's agent as /init: of archives one
// after the other, the kernel unpacks all, and later files replace earlier ones.
func withAgent(t *testing.T, dir, initramfs string) string {
	t.Helper()
	program := filepath.Join(dir, "init")
	build := osexec.Command("go", "build", "-ldflags", "-s -w", "-o", program, "github.com/holdpoint/holdpoint/cmd/holdpoint-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build agent: %v\n%s", err, out)
	}
	code, err := os.ReadFile(program)
	must(t, err)
	archive, err := os.ReadFile(initramfs)
	must(t, err)
	both := bytes.NewBuffer(append(archive, make([]byte, -len(archive)&3)...))
	for _, e := range []struct {
		name string
		mode int
		data []byte
	}{{"init", 0o100755, code}, {"TRAILER!!!", 0, nil}} {
		head := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00", 0, e.mode, 0, 0, 1, 0, len(e.data), 0, 0, 0, 0, len(e.name)+1, 0, e.name)
		both.WriteString(head + strings.Repeat("\x00", -len(head)&3))
		both.Write(append(e.data, make([]byte, -len(e.data)&3)...))
	}
	path := filepath.Join(dir, "initramfs")
	must(t, os.WriteFile(path, both.Bytes(), 0o600))
	return path
}

// shell runs a command in the guest and gives what it printed.
func shell(t *testing.T, c *monitor.Client, script string) string {
	t.Helper()
	s := c.Agent().Exec(ctx(t))
	must(t, s.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: &agentv1.ExecStart{Argv: []string{"/bin/sh", "-c", script}}}}))
	must(t, s.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_StdinEnd{StdinEnd: &agentv1.StdinEnd{}}}))
	var out strings.Builder
	for {
		m, err := s.Receive()
		must(t, err)
		out.Write(m.GetStdout())
		out.Write(m.GetStderr())
		if exit := m.GetExit(); exit != nil {
			if exit.GetCode() != 0 {
				t.Fatalf("%s: exit %v, %s", script, exit, out.String())
			}
			_ = s.CloseRequest()
			_ = s.CloseResponse()
			return strings.TrimSpace(out.String())
		}
	}
}

// upReal starts the monitor and waits for a guest that takes seconds to boot.
func (b *bench) upReal() *monitor.Client {
	b.t.Helper()
	began := time.Now()
	c := b.up()
	b.t.Logf("ready after %s", time.Since(began).Round(10*time.Millisecond))
	return c
}

func TestRealGuest(t *testing.T) {
	start := time.Now()
	step := func(what string) { t.Logf("%8s %s", time.Since(start).Round(time.Millisecond), what) }
	b := newRealBench(t)
	c := b.upReal()
	if name := shell(t, c, "hostname; cat /etc/machine-id"); name != "m\n"+strings.Repeat("5a", 16) {
		t.Errorf("guest is %q", name)
	}
	boot := shell(t, c, "sleep 100000 >/dev/null 2>&1 & cat /proc/sys/kernel/random/boot_id")
	before, err := c.Status(ctx(t))
	must(t, err)

	// The monitor is killed; a successor goes on with the same guest.
	began := time.Now()
	b.killMonitor()
	c = b.ensure()
	after, err := c.AwaitReady(ctx(t))
	must(t, err)
	t.Logf("successor ready after %s", time.Since(began).Round(time.Millisecond))
	if after.GetQemuPid() != before.GetQemuPid() || shell(t, c, "cat /proc/sys/kernel/random/boot_id") != boot {
		t.Errorf("before %v, after %v", before, after)
	}

	step("successor")
	// A user's pause survives the monitor, and the disk is switched in it.
	must(t, c.Pause(ctx(t)))
	b.killMonitor()
	c = b.ensure()
	next := machine.Layer{ID: "next", Path: filepath.Join(b.dir, "next.qcow2"), Format: "qcow2"}
	size, err := disk.VirtualSize(disk.Layer{ID: "top", Path: filepath.Join(b.dir, "top.qcow2"), Format: "qcow2"})
	must(t, err)
	must(t, disk.New(disk.Config{}).Create(ctx(t), next.Path, size))
	step("paused and adopted")
	must(t, c.SwitchDisk(ctx(t), next))
	step("switched")
	must(t, c.Resume(ctx(t)))
	_, err = c.AwaitReady(ctx(t))
	must(t, err)
	step("resumed")
	shell(t, c, "echo kept >/root/kept && sync")
	step("wrote")

	// The guest reboots: a new run with the switched disk, told again.
	b.reboot(c, after.GetRunId())
	if got := shell(t, c, "cat /root/kept /root/boots"); got != "kept\nbooted\nbooted" {
		t.Errorf("after the reboot: %q", got)
	}

	step("rebooted")
	exit, err := c.Shutdown(ctx(t), time.Minute)
	must(t, err)
	step("shut down")
	if !exit.GetClean() || exit.GetReason() != "guest-shutdown" {
		t.Errorf("exit %v", exit)
	}
	b.awaitDead()
}

// reboot resets the guest from inside and waits for its new run.
func (b *bench) reboot(c *monitor.Client, oldRun string) {
	b.t.Helper()
	s := c.Agent().Exec(ctx(b.t))
	must(b.t, s.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: &agentv1.ExecStart{Argv: []string{"/bin/sh", "-c", "echo b >/proc/sysrq-trigger"}}}}))
	enough := fmt.Errorf("enough")
	err := c.Watch(ctx(b.t), func(st *monitorv1.StatusResponse) error {
		if st.GetRunId() != oldRun && st.GetReady() {
			return enough
		}
		return nil
	})
	if err != enough {
		b.t.Fatalf("reboot: %v", err)
	}
	_ = s.CloseRequest()
	_ = s.CloseResponse()
}

// TestRealCost shows what the monitor of a real guest costs at rest.
func TestRealCost(t *testing.T) {
	b := newRealBench(t)
	c := b.upReal()
	began := time.Now()
	const rounds = 50
	for range rounds {
		shell(t, c, "true")
	}
	t.Logf("sh -c true through the monitor: %s each", (time.Since(began) / rounds).Round(100*time.Microsecond))
	st, err := c.Status(ctx(t))
	must(t, err)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", st.GetMonitorPid()))
	must(t, err)
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "VmRSS") || strings.HasPrefix(line, "RssAnon") {
			t.Log(strings.TrimSpace(line))
		}
	}
	must(t, unix.Kill(int(st.GetQemuPid()), unix.SIGKILL))
	last, err := c.AwaitExit(ctx(t))
	must(t, err)
	if last.GetExit().GetReason() != "crashed" {
		t.Errorf("exit %v", last.GetExit())
	}
}
