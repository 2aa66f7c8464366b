//go:build linux

package interfaces

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// TestUp sets a device of a network namespace of its own up, twice.
func TestUp(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	runtime.LockOSThread() // and the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Skip(err)
	}
	run := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("ip", args...).CombinedOutput()
		if err != nil {
			t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	const mac = "52:54:00:11:22:33"
	s := Setting{
		MAC: mac, MTU: 9000,
		Addresses:   []netip.Prefix{netip.MustParsePrefix("198.18.0.2/30"), netip.MustParsePrefix("fd00::2/64")},
		Gateways:    []netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fd00::1")},
		Nameservers: []netip.Addr{netip.MustParseAddr("198.18.0.1")},
	}
	if err := Up(s); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("without a device: %v", err)
	}
	run("link", "add", "net0", "address", mac, "type", "veth", "peer", "name", "host0")
	run("link", "set", "host0", "up")
	for range 2 {
		if err := Up(s); err != nil {
			t.Fatal(err)
		}
	}
	dev, err := net.InterfaceByName("net0")
	if err != nil {
		t.Fatal(err)
	}
	addrs, _ := dev.Addrs()
	var got []string
	for _, a := range addrs {
		got = append(got, a.String())
	}
	all := strings.Join(got, " ")
	if dev.MTU != 9000 || dev.Flags&net.FlagUp == 0 || !strings.Contains(all, "198.18.0.2/30") || !strings.Contains(all, "fd00::2/64") {
		t.Errorf("MTU %d, %v, %s", dev.MTU, dev.Flags, all)
	}
	if out := run("-4", "route", "show", "default") + run("-6", "route", "show", "default"); !strings.Contains(out, "via 198.18.0.1 dev net0") || !strings.Contains(out, "via fd00::1 dev net0") || strings.Count(out, "\n") != 2 {
		t.Error(out)
	}
}

func TestWriteNameservers(t *testing.T) {
	root := t.TempDir()
	servers := []netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fd00::1")}
	if err := WriteNameservers(root, servers); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("without /etc: %v", err)
	}
	path := filepath.Join(root, "etc/resolv.conf")
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := WriteNameservers(root, servers); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("a folder in its place: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := WriteNameservers(root, servers); err != nil {
			t.Fatal(err)
		}
		if b, _ := os.ReadFile(path); string(b) != "nameserver 198.18.0.1\nnameserver fd00::1\n" {
			t.Errorf("%q", b)
		}
	}
}
