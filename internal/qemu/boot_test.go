//go:build linux

package qemu

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/logs"
	"github.com/holdpoint/holdpoint/internal/qemu/process"
)

// guest makes configurations that boot the fixture's kernel into our test guest.
func (b *bench) guest(t testing.TB) func(t testing.TB) machine.RunConfig {
	t.Helper()
	dir := os.Getenv("HOLDPOINT_TEST_IMAGE")
	if dir == "" {
		t.Skip("HOLDPOINT_TEST_IMAGE names no folder with a kernel and an initramfs")
	}
	initramfs := filepath.Join(b.dir, "initramfs")
	modules, err := os.ReadFile(filepath.Join(dir, "initramfs"))
	if os.IsNotExist(err) {
		modules, err = os.ReadFile(filepath.Join(dir, "initramfs-modules.cpio"))
	}
	must(t, err)
	program := filepath.Join(b.dir, "guest")
	build := exec.Command("go", "build", "-o", program, "./testdata/guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build guest: %v\n%s", err, out)
	}
	code, err := os.ReadFile(program)
	must(t, err)
	// Later archives replace what earlier ones hold.
	archive := append(append([]byte(nil), modules...), make([]byte, -len(modules)&3)...)
	must(t, os.WriteFile(initramfs, append(archive, newc("init", code)...), 0o600))
	return func(t testing.TB) machine.RunConfig {
		cfg := b.config(t)
		cfg.Kernel, cfg.Initramfs, cfg.CPUs = filepath.Join(dir, "kernel"), initramfs, 2
		cfg.MemoryBytes, cfg.Cmdline = 256<<20, "rdinit=/init"
		return cfg
	}
}

// newc is a cpio archive of one executable.
func newc(name string, data []byte) []byte {
	var b bytes.Buffer
	entry := func(name string, mode int, data []byte) {
		fmt.Fprintf(&b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
			0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0, name)
		b.Write(make([]byte, -b.Len()&3))
		b.Write(data)
		b.Write(make([]byte, -b.Len()&3))
	}
	entry(name, 0o100755, data)
	entry("TRAILER!!!", 0, nil)
	return b.Bytes()
}

// talk is one conversation with the test guest.
type talk struct {
	t    testing.TB
	conn net.Conn
	r    *bufio.Reader
}

func dialGuest(t testing.TB, r machine.Run) *talk {
	t.Helper()
	conn, err := r.DialLink(ctxOf(t))
	must(t, err)
	must(t, conn.SetDeadline(time.Now().Add(5*time.Minute)))
	k := &talk{t: t, conn: conn, r: bufio.NewReader(conn)}
	nonce := durable.NewID()
	k.say("") // ends what an earlier conversation may have left half said
	k.say("ping %s", nonce)
	for k.line() != "pong "+nonce {
	}
	return k
}

func (k *talk) say(format string, args ...any) {
	k.t.Helper()
	_, err := fmt.Fprintf(k.conn, format+"\n", args...)
	must(k.t, err)
}

func (k *talk) line() string {
	k.t.Helper()
	line, err := k.r.ReadString('\n')
	must(k.t, err)
	return strings.TrimSpace(line)
}

func (k *talk) want(answer, format string, args ...any) {
	k.t.Helper()
	k.say(format, args...)
	if got := k.line(); got != answer {
		k.t.Fatalf("guest answered %q to %q, want %q", got, fmt.Sprintf(format, args...), answer)
	}
}

// contents reads what a chain shows at an offset, in MiB.
func contents(t *testing.T, chain []machine.Layer, mib int) string {
	t.Helper()
	layers := make([]disk.Layer, len(chain))
	for i, l := range chain {
		layers[i] = disk.Layer(l)
	}
	opts, err := disk.ChainJSON(layers, false)
	must(t, err)
	must(t, disk.New(disk.Config{}).Check(ctxOf(t), layers))
	raw := filepath.Join(t.TempDir(), "raw")
	out, err := exec.Command("qemu-img", "convert", "-O", "raw", "json:"+string(opts), raw).CombinedOutput()
	if err != nil {
		t.Fatalf("convert: %v %s", err, out)
	}
	f, err := os.Open(raw)
	must(t, err)
	defer f.Close()
	text, err := io.ReadAll(io.NewSectionReader(f, int64(mib)<<20, 64))
	must(t, err)
	return string(bytes.TrimRight(text, "\x00"))
}

func TestBootSwitchAdoptShutdown(t *testing.T) {
	b := newBench(t)
	cfg := b.guest(t)(t)
	r := b.launch(t, cfg)
	must(t, r.Resume(ctxOf(t)))
	k := dialGuest(t, r)
	k.want("ok", "write 1 first")
	k.want("text first", "read 1")
	k.want("virtio_rng.0", "random")

	must(t, r.Pause(ctxOf(t)))
	k.say("ping paused")
	must(t, k.conn.SetReadDeadline(time.Now().Add(300*time.Millisecond)))
	if line, err := k.r.ReadString('\n'); err == nil {
		t.Errorf("a paused guest answered %q", line)
	}
	must(t, k.conn.SetReadDeadline(time.Now().Add(5*time.Minute)))
	top := b.overlay(t)
	must(t, r.SwitchDisk(ctxOf(t), top))
	must(t, r.Resume(ctxOf(t)))
	if got := k.line(); got != "pong paused" {
		t.Errorf("resumed guest answered %q", got)
	}
	k.want("ok", "write 2 second")
	k.want("text first", "read 1")
	must(t, k.conn.Close())
	checkProcess(t, cfg, r.Process().PID)

	must(t, r.Close())
	chain := append(append([]machine.Layer(nil), cfg.Disk...), top)
	cfg.Disk = chain
	next, err := b.q.Adopt(ctxOf(t), cfg, r.Process())
	must(t, err)
	defer next.Close()
	k = dialGuest(t, next)
	k.want("text second", "read 2")
	k.say("poweroff")
	awaitExit(t, next, machine.GuestShutdown)
	_ = k.conn.Close()
	if got := contents(t, chain, 1) + " " + contents(t, chain, 2); got != "first second" {
		t.Errorf("the whole chain shows %q", got)
	}
	if got := contents(t, chain[:2], 1) + " " + contents(t, chain[:2], 2); got != "first " {
		t.Errorf("the sealed layer shows %q", got)
	}
	if console := string(logs.Tail(filepath.Join(cfg.Dir, consoleFile), 1<<20)); !strings.Contains(console, "guest: ready") {
		t.Error("the console log has no word of the guest")
	}
	if _, err := os.Stat(filepath.Join(cfg.SocketDir, qmpSocket)); err == nil {
		t.Error("a socket was left")
	}
}

// checkProcess looks at the process of a guest that has run for a while.
func checkProcess(t *testing.T, cfg machine.RunConfig, pid int) {
	t.Helper()
	if n, err := disk.Allocated(filepath.Join(cfg.Dir, memoryFile)); err != nil || n != 0 {
		t.Errorf("the memory file has %d bytes, %v; the guest's pages must be private", n, err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	if !strings.Contains(string(status), "Seccomp:\t2") {
		t.Error("the process is not in a sandbox")
	}
	session, err := unix.Getsid(pid)
	if err != nil || session != pid {
		t.Errorf("the process is in session %d, %v; want its own", session, err)
	}
}

// A guest that reboots or panics while nobody watches must not look as if it
// had shut down.
func TestUnwatchedEnds(t *testing.T) {
	b := newBench(t)
	config := b.guest(t)
	for command, want := range map[string]machine.ExitReason{
		"reboot": machine.GuestReset, "poweroff": machine.GuestShutdown,
	} {
		t.Run(command, func(t *testing.T) {
			cfg := config(t)
			r := b.launch(t, cfg)
			must(t, r.Resume(ctxOf(t)))
			k := dialGuest(t, r)
			must(t, r.Close())
			p, err := process.Open(r.Process().PID)
			must(t, err)
			k.say("%s", command)
			status, err := p.Wait()
			must(t, err)
			must(t, p.Close())
			_ = k.conn.Close()
			if !status.Exited() || status.ExitStatus() != 0 {
				t.Errorf("status %v", status)
			}
			if got := b.q.ExitOf(cfg); got.Reason != want {
				t.Errorf("exit is %+v, want %s", got, want)
			}
			if _, err := b.q.Adopt(ctxOf(t), cfg, r.Process()); !errdefs.Is(err, errdefs.NotFound) {
				t.Errorf("adopt: %v", err)
			}
		})
	}
}

func TestPanicEndsTheRun(t *testing.T) {
	b := newBench(t)
	cfg := b.guest(t)(t)
	r := b.launch(t, cfg)
	must(t, r.Resume(ctxOf(t)))
	k := dialGuest(t, r)
	k.say("panic")
	select {
	case <-r.Exited():
	case <-time.After(5 * time.Minute):
		t.Fatalf("a panicked guest goes on; its console:\n%s", logs.Tail(filepath.Join(cfg.Dir, consoleFile), 3000))
	}
	_ = k.conn.Close()
	t.Logf("%+v", r.Exit())
	// A kernel without a pvpanic driver loaded can only reset.
	if got := r.Exit().Reason; got != machine.GuestPanic && got != machine.GuestReset {
		t.Errorf("exit is %+v", r.Exit())
	}
}
