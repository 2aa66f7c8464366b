//go:build linux

package host

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newHost(t *testing.T) *Host {
	t.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip("qemu-system-x86_64 is not installed")
	}
	return New(Config{CacheDir: filepath.Join(t.TempDir(), "cache"), Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func ctxOf(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestHighestQ35(t *testing.T) {
	got := highestQ35([]string{"pc-q35-4.0.1", "pc-q35-2.12", "pc-q35-noble", "pc-q35-9.2", "q35", "pc-q35-10.0", "pc-i440fx-11.0", "pc-q35-rhel9.6.0"})
	if got != "pc-q35-10.0" {
		t.Errorf("got %q", got)
	}
	if got := highestQ35([]string{"q35"}); got != "" {
		t.Errorf("got %q of no versioned one", got)
	}
}

func TestProbeIsRemembered(t *testing.T) {
	h := newHost(t)
	caps, err := h.Probe(ctxOf(t))
	must(t, err)
	if !strings.HasPrefix(caps.Version, caps.Line+".") || !strings.HasPrefix(caps.MachineType, "pc-q35-") || !filepath.IsAbs(caps.Binary) {
		t.Errorf("capabilities %+v", caps)
	}
	// A second one with an ended context can only be answered from memory, one of
	// another process only from the cache.
	ctx, cancel := context.WithCancel(ctxOf(t))
	cancel()
	again, err := h.Probe(ctx)
	if err != nil || !reflect.DeepEqual(again, caps) {
		t.Errorf("second probe %+v, %v", again, err)
	}
	other, err := New(h.cfg).Probe(ctx)
	if err != nil || !reflect.DeepEqual(other, caps) {
		t.Errorf("other process's probe %+v, %v", other, err)
	}
	if _, err := New(Config{}).Probe(ctx); err == nil {
		t.Error("probe without a cache, and with an ended context, worked")
	}
}

// script writes an executable that stands for QEMU.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qemu")
	must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700))
	return path
}

func TestUnfitBinaries(t *testing.T) {
	for name, bin := range map[string]string{
		"missing": "no-such-qemu-anywhere", "not executable": "/etc/hostname",
	} {
		_, err := New(Config{Binary: bin}).Probe(ctxOf(t))
		if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "qemu-system-x86") {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := New(Config{Binary: script(t, "echo it is broken >&2; exit 1")}).Probe(ctxOf(t))
	if err == nil || !strings.Contains(err.Error(), "it is broken") {
		t.Errorf("broken binary: %v", err)
	}
	old := `echo '{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 6}}}}' >&3
while read -r line <&3; do id=${line##*\"id\":\"}; echo "{\"return\": [], \"id\": \"${id%%\"*}\"}" >&3; done`
	_, err = New(Config{Binary: script(t, old)}).Probe(ctxOf(t))
	if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "6.2.0") || !strings.Contains(err.Error(), "too old") {
		t.Errorf("old binary: %v", err)
	}
}

// kernelOf is the fixture's kernel.
func kernelOf(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("HOLDPOINT_TEST_IMAGE")
	if dir == "" {
		t.Skip("HOLDPOINT_TEST_IMAGE names no folder with kernel, initramfs and root.img")
	}
	return filepath.Join(dir, "kernel")
}

func TestKVMWithoutDevice(t *testing.T) {
	h := newHost(t)
	cfg := h.cfg
	cfg.KVMDevice = filepath.Join(t.TempDir(), "kvm")
	a, err := New(cfg).Accelerator(ctxOf(t), "/dev/null")
	if err != nil || a.Name != "tcg" || !strings.Contains(a.Reason, "does not exist") || a.Fix == "" {
		t.Errorf("no device: %+v, %v", a, err)
	}
	must(t, os.WriteFile(cfg.KVMDevice, nil, 0))
	if os.Getuid() != 0 {
		a, err = New(cfg).Accelerator(ctxOf(t), "/dev/null")
		if err != nil || a.Name != "tcg" || !strings.Contains(a.Fix, "usermod -aG kvm") {
			t.Errorf("no permission: %+v, %v", a, err)
		}
	}
	for _, want := range []string{"kvm", "tcg"} {
		a, err := New(Config{Accelerator: want}).Accelerator(ctxOf(t), "")
		if err != nil || a.Name != want {
			t.Errorf("forced %s: %+v, %v", want, a, err)
		}
	}
	if _, err := New(Config{Accelerator: "hvf"}).Accelerator(ctxOf(t), ""); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("forced nonsense: %v", err)
	}
}

// A QEMU that never prints a marker stands for a KVM that lies.
func TestLyingKVMIsFoundOutInTime(t *testing.T) {
	h := newHost(t)
	caps, err := h.Probe(ctxOf(t))
	must(t, err)
	cfg := h.cfg
	cfg.KVMDevice, cfg.KVMLimit = "/dev/null", 300*time.Millisecond
	pid := filepath.Join(t.TempDir(), "pid")
	caps.Binary = script(t, "echo $$ > "+pid+"; echo early boot; exec sleep 100")
	start := time.Now()
	a := New(cfg).bootKVM(ctxOf(t), caps, "/dev/null")
	if a.Name != "tcg" || !strings.Contains(a.Reason, "early boot") || time.Since(start) > 90*time.Second {
		t.Errorf("after %v: %+v", time.Since(start), a)
	}
	text, err := os.ReadFile(pid)
	must(t, err)
	if _, err := os.Stat("/proc/" + strings.TrimSpace(string(text))); err == nil {
		t.Error("a process was left")
	}
	caps.Binary = script(t, "echo 'VFS: Unable to mount root fs on unknown-block(0,0)'; exec sleep 100")
	if a := New(cfg).bootKVM(ctxOf(t), caps, "/dev/null"); a.Name != "kvm" {
		t.Errorf("good KVM: %+v", a)
	}
}

func TestKVMHere(t *testing.T) {
	h := newHost(t)
	kernel := kernelOf(t)
	start := time.Now()
	a, err := h.Accelerator(ctxOf(t), kernel)
	must(t, err)
	t.Logf("%+v after %v", a, time.Since(start))
	if (a.Name == "tcg") != (a.Reason != "") || time.Since(start) > time.Minute {
		t.Errorf("%+v after %v", a, time.Since(start))
	}
	start = time.Now()
	again, err := New(h.cfg).Accelerator(ctxOf(t), kernel)
	if err != nil || again.Name != a.Name || again.Reason != a.Reason || again.Fresh || time.Since(start) > 20*time.Second {
		t.Errorf("again: %+v, %v after %v", again, err, time.Since(start))
	}
}
