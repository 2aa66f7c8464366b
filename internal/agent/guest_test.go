//go:build linux

package agent_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/link"
)

// realGuest is this agent in an emulated machine, of which QEMU's own snapshots
// give the same instant again and again.
type realGuest struct {
	machine
	dir   string
	magic link.Magic
	hmp   net.Conn
	reply *bufio.Reader
}

func bootReal(t *testing.T) *realGuest {
	t.Helper()
	image := os.Getenv("HOLDPOINT_TEST_IMAGE")
	if image == "" {
		t.Skip("HOLDPOINT_TEST_IMAGE names no image to boot")
	}
	g := &realGuest{dir: t.TempDir(), magic: link.NewMagic()}
	file := func(name string) string { return filepath.Join(g.dir, name) }
	run := func(name string, args ...string) {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	run("go", "build", "-o", file("agent"), "../../cmd/holdpoint-agent")
	run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", filepath.Join(image, "root.img"), file("disk"))
	initramfs, err := os.ReadFile(filepath.Join(image, "initramfs"))
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile(file("agent"))
	if err != nil {
		t.Fatal(err)
	}
	// Later archives replace what earlier ones hold.
	initramfs = append(initramfs, make([]byte, -len(initramfs)&3)...)
	if err := os.WriteFile(file("initramfs"), append(initramfs, newc("init", code)...), 0o600); err != nil {
		t.Fatal(err)
	}
	qemu := exec.Command("qemu-system-x86_64", "-machine", "q35,accel=tcg", "-cpu", "max", "-m", "256", "-smp", "2",
		"-nodefaults", "-display", "none", "-no-reboot", "-serial", "file:"+file("console"),
		"-kernel", filepath.Join(image, "kernel"), "-initrd", file("initramfs"),
		"-append", "console=ttyS0 quiet cryptomgr.notests holdpoint.magic="+g.magic.String(),
		"-drive", "if=virtio,format=qcow2,file="+file("disk"),
		"-netdev", "user,id=n", "-device", "virtio-net-pci,netdev=n", "-device", "virtio-rng-pci",
		"-chardev", "socket,id=a,server=on,wait=off,path="+file("a"),
		"-device", "virtio-serial-pci", "-device", "virtserialport,chardev=a,name=holdpoint.agent",
		"-monitor", "unix:"+file("m")+",server=on,wait=off")
	var said bytes.Buffer
	qemu.Stderr = &said
	if err := qemu.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = qemu.Wait(); close(ended) }()
	t.Cleanup(func() {
		_ = qemu.Process.Kill()
		<-ended
		if t.Failed() {
			console, _ := os.ReadFile(file("console"))
			t.Logf("QEMU: %s\nconsole: %s", said.Bytes(), console[max(0, len(console)-4000):])
		}
	})
	g.hmp = dialUnix(t, file("m"))
	g.reply = bufio.NewReader(g.hmp)
	g.prompt(t)
	return g
}

// dialUnix connects to a socket that is about to come up.
func dialUnix(t *testing.T, name string) net.Conn {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("unix", name)
		if err == nil {
			t.Cleanup(func() { _ = conn.Close() })
			return conn
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// prompt reads QEMU's answer up to its next prompt.
func (g *realGuest) prompt(t *testing.T) {
	t.Helper()
	_ = g.hmp.SetDeadline(time.Now().Add(2 * time.Minute))
	var b []byte
	for !bytes.HasSuffix(b, []byte("(qemu) ")) {
		c, err := g.reply.ReadByte()
		if err != nil {
			t.Fatalf("QEMU's monitor: %v after %q", err, b)
		}
		b = append(b, c)
	}
	if bytes.Contains(b, []byte("Error")) {
		t.Fatalf("QEMU's monitor says %q", b)
	}
}

func (g *realGuest) do(t *testing.T, command string) {
	t.Helper()
	if _, err := fmt.Fprintln(g.hmp, command); err != nil {
		t.Fatal(err)
	}
	g.prompt(t)
}

// meet begins a conversation over a connection of its own; leave ends both.
func (g *realGuest) meet(t *testing.T) (leave func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	conn, err := link.Host(ctx, dialUnix(t, filepath.Join(g.dir, "a")), g.magic)
	if err != nil {
		t.Fatal(err)
	}
	tr := link.NewTransport(conn)
	g.AgentServiceClient = agentv1connect.NewAgentServiceClient(&http.Client{Transport: tr}, "http://guest")
	return func() { _ = conn.Close(); tr.CloseIdleConnections() }
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

// TestRealGuestContinues restores one instant twice and makes each a machine
// of its own: name, entropy, clock, connections, and the commands run on.
func TestRealGuestContinues(t *testing.T) {
	g := bootReal(t)
	outside, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	leave := g.meet(t)
	m := &g.machine
	conf := &agentv1.ConfigureRequest{Hostname: "origin", MachineId: strings.Repeat("1", 32), UnixNano: time.Now().UnixNano(), Entropy: make([]byte, 32)}
	if _, err := m.Configure(testCtx(t), connect.NewRequest(conf)); err != nil {
		t.Fatal(err)
	}
	dev := strings.TrimSpace(sh(t, m, "ls /sys/class/net | grep -v lo").stdout)
	if r := sh(t, m, "ip addr add 10.0.2.15/24 dev "+dev+" && ip link set "+dev+" up"); r.exit.GetCode() != 0 {
		t.Fatalf("%+v", r)
	}
	connected := start(t, m, &agentv1.ExecStart{Argv: []string{"bash", "-c", fmt.Sprintf(
		`exec 3<>/dev/tcp/10.0.2.2/%d && echo hello >&3 && echo connected; read -u 3 x; echo "read $?"`,
		outside.Addr().(*net.TCPAddr).Port)}})
	far, err := outside.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	_, first := until(t, connected, "connected\n")
	asks := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", `echo up; n=0
		while read x; do n=$((n+1)); echo "$n $(hostname) $(cat /etc/machine-id) $(cat /proc/sys/kernel/random/uuid)."; done`}})
	_, second := until(t, asks, "up\n")
	stdin(t, asks, "\n")
	until(t, asks, ".\n")
	g.do(t, "stop")
	g.do(t, "savevm instant")
	leave()
	uuids := map[string]bool{}
	for i, name := range []string{"fork-1", "fork-2"} {
		g.do(t, "loadvm instant")
		g.do(t, "cont")
		leave := g.meet(t)
		if off := offset(t, m); off > -20*time.Millisecond {
			t.Errorf("a restored guest's clock is %s off before it is told", off)
		}
		entropy := make([]byte, 64)
		_, _ = rand.Read(entropy)
		id := strings.Repeat(fmt.Sprint(i+2), 32)
		r, err := m.Continue(testCtx(t), connect.NewRequest(&agentv1.ContinueRequest{
			Hostname: name, MachineId: id, UnixNano: time.Now().UnixNano(), Entropy: entropy,
		}))
		if err != nil {
			t.Fatal(err)
		}
		for n := 0; offset(t, m).Abs() > 20*time.Millisecond; n++ {
			if n == 10 {
				t.Fatalf("the clock is %s off after %d steps", offset(t, m), n)
			}
			if _, err := m.StepClock(testCtx(t), connect.NewRequest(&agentv1.StepClockRequest{DeltaNano: -int64(offset(t, m))})); err != nil {
				t.Fatal(err)
			}
		}
		if list := commands(t, m); len(list) != 2 || list[0].GetAttached() || list[1].GetAttached() || !list[1].GetRunning() {
			t.Errorf("commands: %v", list)
		}
		if n := r.Msg.GetClosedSockets(); n != 1 {
			t.Errorf("%d sockets were closed", n)
		} else if r := finish(t, attach(t, m, first.GetCommandId(), false)); r.stdout != "connected\nread 1\n" || !strings.Contains(r.stderr, "abort") {
			t.Errorf("the connected program: %+v", r)
		}
		at := attach(t, m, second.GetCommandId(), true)
		stdin(t, at, "\n")
		line, _ := until(t, at, ".\n")
		want := "2 " + name + " " + id + " "
		if uuid, ok := strings.CutPrefix(line, want); !ok || uuids[uuid] {
			t.Errorf("got %q, want %q and a new uuid", line, want)
		} else {
			uuids[uuid] = true
		}
		leave()
	}
}
