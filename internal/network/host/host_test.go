package host

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestIsHost(t *testing.T) {
	var h Host
	for addr, want := range map[string]bool{
		"127.0.0.1": true, "127.1.2.3": true, "::1": true, "::ffff:127.0.0.1": true, "0.0.0.0": true,
		"192.0.2.77": false, "2001:db8::77": false,
	} {
		if got := h.IsHost(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		p := netip.MustParsePrefix(a.String())
		if !h.IsHost(p.Addr()) {
			t.Errorf("%s is an interface's", p.Addr())
		}
	}
}

func TestIsBroadcast(t *testing.T) {
	_, n, _ := net.ParseCIDR("192.168.4.0/22")
	n.IP = net.ParseIP("192.168.5.9")
	for addr, want := range map[string]bool{"192.168.5.9": false, "192.168.7.255": true, "192.168.5.255": false, "192.168.5.8": false, "::1": false} {
		if got := isLast(n, netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
	for addr, want := range map[string]bool{"127.255.255.255": true, "255.255.255.255": true, "127.0.0.1": false, "192.0.2.77": false} {
		if got := (Host{}).IsBroadcast(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
	if conn, err := (Host{}).Dial(t.Context(), "udp", netip.MustParseAddrPort("127.255.255.255:9")); err == nil {
		_ = conn.Close()
		t.Error("a broadcast address is connected to")
	}
}

func TestNameservers(t *testing.T) {
	for conf, want := range map[string][]string{
		"": {"127.0.0.1:53"},
		"# nameserver 9.9.9.9\nsearch x\nnameserver 1.1.1.1\nnameserver fe80::1%eth0\nnameserver bad\nnameserver ::1\nnameserver 4.4.4.4\n": {"1.1.1.1:53", "[fe80::1%eth0]:53", "[::1]:53"},
	} {
		var got []string
		for _, s := range nameservers(strings.NewReader(conf)) {
			got = append(got, s.String())
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: %v", conf, got)
		}
	}
}
