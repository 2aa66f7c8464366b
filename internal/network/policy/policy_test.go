package policy

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// world is a host with some addresses, and names with their addresses.
type world struct {
	names map[string][]netip.Addr
}

func (world) IsHost(a netip.Addr) bool {
	for _, own := range []string{"192.168.7.20", "8.8.4.4", "2600::20", "fd12::20", "192.0.2.2", "240.0.0.2", "169.254.1.2", "169.254.169.254", "127.0.0.1", "0.0.0.0"} {
		if a == netip.MustParseAddr(own) {
			return true
		}
	}
	return false
}

func (world) IsBroadcast(a netip.Addr) bool {
	return a == netip.MustParseAddr("192.168.7.255") || a == netip.MustParseAddr("8.8.7.255")
}

func (w world) HasName(a netip.Addr, name string) bool {
	for _, b := range w.names[name] {
		if a == b {
			return true
		}
	}
	return false
}

func rules(t *testing.T, p Policy) Rules {
	t.Helper()
	r, err := p.Compile()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRanges has, of each range, an address (and the first and last of some),
// and what internet and open say of it.
func TestRanges(t *testing.T) {
	tests := []struct {
		addr           string
		internet, open Reason
	}{
		// Public.
		{"1.1.1.1", "", ""},
		{"9.255.255.255", "", ""},
		{"11.0.0.0", "", ""},
		{"100.63.255.255", "", ""},
		{"100.128.0.0", "", ""},
		{"126.255.255.255", "", ""},
		{"128.0.0.0", "", ""},
		{"169.253.255.255", "", ""},
		{"172.15.255.255", "", ""},
		{"172.32.0.0", "", ""},
		{"192.167.255.255", "", ""},
		{"198.17.255.255", "", ""},
		{"198.20.0.0", "", ""},
		{"223.255.255.255", "", ""},
		{"2606:4700::1111", "", ""},
		{"2a00:1450::1", "", ""},
		// The host's own, public ones too.
		{"8.8.4.4", Host, Host},
		{"192.168.7.20", Host, Host},
		{"2600::20", Host, Host},
		{"fd12::20", Host, Host},
		{"192.0.2.2", Host, Host}, // of a reserved block, too
		{"240.0.0.2", Host, Host},
		{"64:ff9b::192.0.2.2", Host, Host},
		{"169.254.1.2", LinkLocal, LinkLocal},
		// Private.
		{"10.0.0.0", Private, ""},
		{"10.255.255.255", Private, ""},
		{"172.16.0.1", Private, ""},
		{"172.31.255.255", Private, ""},
		{"192.168.0.1", Private, ""},
		{"100.64.0.1", Private, ""},
		{"100.127.255.255", Private, ""},
		{"fc00::1", Private, ""},
		{"fdff::1", Private, ""},
		// Never.
		{"0.0.0.0", Unspecified, Unspecified},
		{"0.1.2.3", Unspecified, Unspecified},
		{"::", Unspecified, Unspecified},
		{"127.0.0.1", Loopback, Loopback},
		{"127.255.255.255", Loopback, Loopback},
		{"::1", Loopback, Loopback},
		{"169.254.0.1", LinkLocal, LinkLocal},
		{"fe80::1", LinkLocal, LinkLocal},
		{"fe80::1%eth0", LinkLocal, LinkLocal},
		{"febf::1", LinkLocal, LinkLocal},
		{"fec0::1", Reserved, Reserved},
		{"169.254.169.254", Metadata, Metadata},
		{"169.254.170.2", Metadata, Metadata},
		{"168.63.129.16", Metadata, Metadata},
		{"100.100.100.200", Metadata, Metadata},
		{"192.0.0.192", Metadata, Metadata},
		{"fd00:ec2::254", Metadata, Metadata},
		{"fd20:ce::254", Metadata, Metadata},
		{"224.0.0.251", Multicast, Multicast},
		{"239.255.255.255", Multicast, Multicast},
		{"ff02::fb", Multicast, Multicast},
		{"255.255.255.255", Broadcast, Broadcast},
		{"240.0.0.1", Reserved, Reserved},
		{"192.0.0.1", Reserved, Reserved},
		{"192.88.99.1", Reserved, Reserved},
		{"192.0.2.1", Documentation, Documentation},
		{"198.51.100.1", Documentation, Documentation},
		{"203.0.113.1", Documentation, Documentation},
		{"2001:db8::1", Documentation, Documentation},
		{"3fff::1", Documentation, Documentation},
		{"198.18.0.1", Benchmark, Benchmark},
		{"198.19.255.255", Benchmark, Benchmark},
		{"2001:2::1", Benchmark, Benchmark},
		{"100::1", Reserved, Reserved},
		{"4000::1", Reserved, Reserved},
		{"5f00::1", Reserved, Reserved},
		// IPv4 in IPv6, in all its clothes.
		{"::ffff:1.1.1.1", "", ""},
		{"::ffff:127.0.0.1", Loopback, Loopback},
		{"::ffff:10.0.0.1", Private, ""},
		{"::ffff:169.254.169.254", Metadata, Metadata},
		{"::ffff:8.8.4.4", Host, Host},
		{"::127.0.0.1", Reserved, Reserved},
		{"::ffff:0:127.0.0.1", Reserved, Reserved},
		{"64:ff9b::1.1.1.1", "", ""},
		{"64:ff9b::127.0.0.1", Loopback, Loopback},
		{"64:ff9b::10.0.0.1", Private, ""},
		{"64:ff9b::169.254.169.254", Metadata, Metadata},
		{"64:ff9b::8.8.4.4", Host, Host},
		{"64:ff9b:1::1", Reserved, Reserved},
		{"2002:0101:0101::1", "", ""},
		{"2002:7f00:1::1", Loopback, Loopback},
		{"2002:a9fe:a9fe::1", Metadata, Metadata},
		{"2002:0808:0404::1", Host, Host},
		{"2a00::5efe:127.0.0.1", Loopback, Loopback},
		{"fd00::200:5efe:169.254.169.254", Metadata, Metadata},
		{"fd00::5efe:1.1.1.1", Private, ""},
		{"2001:0:1::1", Reserved, Reserved}, // Teredo
	}
	internet, open := rules(t, Policy{Mode: Internet}), rules(t, Policy{Mode: Open})
	for _, tt := range tests {
		a := netip.MustParseAddr(tt.addr)
		for _, protocol := range []string{TCP, UDP} {
			if got := internet.Decide(world{}, protocol, netip.AddrPortFrom(a, 80)); got != tt.internet {
				t.Errorf("internet, %s to %s: %q, want %q", protocol, a, got, tt.internet)
			}
			if got := open.Decide(world{}, protocol, netip.AddrPortFrom(a, 80)); got != tt.open {
				t.Errorf("open, %s to %s: %q, want %q", protocol, a, got, tt.open)
			}
		}
		if got := open.Decide(world{}, "sctp", netip.AddrPortFrom(a, 80)); got != Protocol {
			t.Errorf("sctp to %s: %q", a, got)
		}
	}
	if got := internet.Decide(world{}, TCP, netip.AddrPort{}); got == "" {
		t.Error("no address at all is allowed")
	}
}

func TestAllowHost(t *testing.T) {
	for _, mode := range []Mode{Internet, Open} {
		r := rules(t, Policy{Mode: mode, AllowHost: []int{5432}})
		for to, want := range map[string]Reason{
			"192.168.7.20:5432":      "",
			"8.8.4.4:5432":           "",
			"[fd12::20]:5432":        "",
			"[::ffff:8.8.4.4]:5432":  "",
			"192.168.7.20:5433":      Host,
			"127.0.0.1:5432":         Loopback, // the guest has its own
			"169.254.169.254:5432":   Metadata,
			"[64:ff9b::8.8.4.4]:543": Host,
			"192.0.2.2:5432":         "",
			"192.0.2.2:80":           Host,
			"192.0.2.3:5432":         Documentation,
			"169.254.1.2:5432":       LinkLocal,
			"0.0.0.0:5432":           Unspecified,
		} {
			if got := r.Decide(world{}, TCP, netip.MustParseAddrPort(to)); got != want {
				t.Errorf("%s, %s: %q, want %q", mode, to, got, want)
			}
		}
	}
}

// TestBroadcast: no allowed port of the host opens a way to all of a subnet.
func TestBroadcast(t *testing.T) {
	for _, mode := range []Mode{Internet, Open} {
		r := rules(t, Policy{Mode: mode, AllowHost: []int{9999}, Allow: []string{"8.8.7.255"}})
		for _, to := range []string{"192.168.7.255:9999", "8.8.7.255:9999", "255.255.255.255:9999", "224.0.0.1:9999", "[::ffff:192.168.7.255]:9999"} {
			if why := r.Decide(world{}, UDP, netip.MustParseAddrPort(to)); why != Broadcast && why != Multicast {
				t.Errorf("%s %s: %q", mode, to, why)
			}
		}
	}
}

// TestAllow: a list narrows what the mode allows. A name's addresses count at
// its ports only, and none counts that the mode refuses: whoever answers for
// the name decides nothing.
func TestAllow(t *testing.T) {
	w := world{names: map[string][]netip.Addr{
		"pypi.org":        {netip.MustParseAddr("151.101.0.223"), netip.MustParseAddr("2a04:4e42::223")},
		"rebound.example": {netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.168.7.20"), netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("169.254.169.254")},
		"other.example":   {netip.MustParseAddr("5.5.5.5")},
	}}
	r := rules(t, Policy{Mode: Internet, Allow: []string{"PyPI.org.:443", "rebound.example", "1.1.1.1", "9.9.9.9:853", "[2620:fe::fe]:853", "2606:4700::1111"}})
	for to, want := range map[string]Reason{
		"151.101.0.223:443":       "",
		"[2a04:4e42::223]:443":    "",
		"151.101.0.223:80":        NotListed,
		"151.101.0.224:443":       NotListed,
		"5.5.5.5:443":             NotListed,
		"1.1.1.1:7":               "",
		"[::ffff:1.1.1.1]:7":      "",
		"9.9.9.9:853":             "",
		"9.9.9.9:53":              NotListed,
		"[2620:fe::fe]:853":       "",
		"[2620:fe::fe]:80":        NotListed,
		"[2606:4700::1111]:80":    "",
		"127.0.0.1:80":            Loopback,
		"192.168.7.20:80":         Host,
		"10.1.1.1:80":             Private,
		"169.254.169.254:80":      Metadata,
		"[::ffff:127.0.0.1]:80":   Loopback,
		"[64:ff9b::7f00:1]:80":    Loopback,
		"[64:ff9b::101:101]:80":   NotListed, // not the listed address, but a way to it
		"[2002:7f00:1::1]:80":     Loopback,
		"[2a04:4e42::224]:443":    NotListed,
		"[2a04:4e42::223]:80":     NotListed,
		"[::ffff:10.1.1.1]:80":    Private,
		"[fd00:ec2::254]:80":      Metadata,
		"[::ffff:5.5.5.5]:443":    NotListed,
		"[::ffff:9.9.9.9]:853":    "",
		"[::ffff:9.9.9.9]:53":     NotListed,
		"255.255.255.255:67":      Broadcast,
		"[ff02::1]:5353":          Multicast,
		"[fe80::1%eth0]:80":       LinkLocal,
		"[::ffff:8.8.4.4]:80":     Host,
		"[64:ff9b::808:404]:5432": Host,
	} {
		if got := r.Decide(w, TCP, netip.MustParseAddrPort(to)); got != want {
			t.Errorf("%s: %q, want %q", to, got, want)
		}
	}
	for name, want := range map[string][2]bool{"pypi.org": {true, true}, "evil.example": {false, false}, "x.pypi.org": {false, false}} {
		if allowed, pin := r.Lists(name); allowed != want[0] || pin != want[1] {
			t.Errorf("%s: allowed %v, pinned %v", name, allowed, pin)
		}
	}
	if allowed, pin := rules(t, Policy{Mode: Internet}).Lists("any.example"); !allowed || pin {
		t.Error("without a list every name may be resolved, and none is pinned")
	}
	if got := r.Names(); strings.Join(got, " ") != "pypi.org rebound.example" {
		t.Errorf("names %v", got)
	}
}

func TestCompileRefuses(t *testing.T) {
	for text, p := range map[string]Policy{
		"use none, internet or open":        {Mode: "some"},
		"allows nothing":                    {Mode: None, AllowHost: []int{80}},
		"port from 1":                       {Mode: Internet, AllowHost: []int{0}},
		"65535":                             {Mode: Internet, AllowHost: []int{65536}},
		"name server answers there":         {Mode: Internet, AllowHost: []int{53}},
		"use --network open":                {Mode: Internet, Allow: []string{"10.0.0.1:80"}},
		"--allow-host":                      {Mode: Open, Allow: []string{"127.0.0.1:80"}},
		"metadata":                          {Mode: Open, Allow: []string{"::ffff:169.254.169.254"}},
		"a name or an address":              {Mode: Open, Allow: []string{"a b"}},
		`allow "1.2.3":`:                    {Mode: Open, Allow: []string{"1.2.3"}},
		`allow "x:0"`:                       {Mode: Open, Allow: []string{"x:0"}},
		`allow "x:y"`:                       {Mode: Open, Allow: []string{"x:y"}},
		"brackets":                          {Mode: Open, Allow: []string{"[1.1.1.1]:80"}},
		"257 destinations and 0 ports":      {Mode: Open, Allow: make([]string, 257)},
		"0 destinations and 257 ports":      {Mode: Open, AllowHost: make([]int, 257)},
		`allow "-a.example": give a name`:   {Mode: Open, Allow: []string{"-a.example"}},
		`allow "a..example:443": give a na`: {Mode: Open, Allow: []string{"a..example:443"}},
	} {
		_, err := p.Compile()
		if !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), text) {
			t.Errorf("%+v: %v, want %q", p, err, text)
		}
	}
	if _, err := (Policy{Mode: Open, Allow: []string{"10.0.0.1:80", "fd00::1"}}).Compile(); err != nil {
		t.Error(err)
	}
}

// FuzzCompile: whatever is listed, it is refused in one line or means one thing.
func FuzzCompile(f *testing.F) {
	for _, s := range []string{"a:1", "[::1]:80", "::1", "1.1.1.1:1", "a.", ":", "[", "]:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := Policy{Mode: Internet, Allow: []string{s}}.Compile()
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\r") {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		if len(r.addrs)+len(r.names) != 1 {
			t.Errorf("%q is %v and %v", s, r.addrs, r.names)
		}
	})
}
