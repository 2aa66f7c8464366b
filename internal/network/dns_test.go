package network

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// zone is what the host's name server knows.
type zone map[string][]string

// answer is its answer to a query.
func (z zone) answer(query []byte) []byte {
	var m dnsmessage.Message
	if m.Unpack(query) != nil || len(m.Questions) != 1 {
		return nil
	}
	q := m.Questions[0]
	m.Response = true
	addrs, known := z[strings.ToLower(q.Name.String())]
	if !known {
		m.RCode = dnsmessage.RCodeNameError
	}
	for _, a := range addrs {
		addr, err := netip.ParseAddr(a)
		h := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 60}
		var body dnsmessage.ResourceBody
		switch {
		case err != nil: // another name
			body = &dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName(a)}
		case addr.Is4() && q.Type == dnsmessage.TypeA:
			body = &dnsmessage.AResource{A: addr.As4()}
		case addr.Is6() && q.Type == dnsmessage.TypeAAAA:
			body = &dnsmessage.AAAAResource{AAAA: addr.As16()}
		default:
			continue
		}
		m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: body})
	}
	b, err := m.Pack()
	if err != nil {
		return nil
	}
	return b
}

// resolver makes the zone the host's name server, by UDP and TCP.
func (o *outside) resolver(t *testing.T, z zone) {
	o.dns = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53"), netip.MustParseAddrPort("127.0.0.53:53")} // the first one does not answer
	o.put("udp", "127.0.0.53:53", listenUDP(t, z.answer))
	o.put("tcp", "127.0.0.53:53", listen(t, func(c *net.TCPConn) {
		for {
			var size [2]byte
			if _, err := io.ReadFull(c, size[:]); err != nil {
				return
			}
			query := make([]byte, binary.BigEndian.Uint16(size[:]))
			if _, err := io.ReadFull(c, query); err != nil {
				return
			}
			b := z.answer(query)
			_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
		}
	}))
}

// resolve asks the gateway, as a guest does.
func (g *guest) resolve(protocol, name string, kind dnsmessage.Type) (dnsmessage.RCode, []string) {
	g.t.Helper()
	query := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 4711, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}},
	}
	b, err := query.Pack()
	if err != nil {
		g.t.Fatal(err)
	}
	buf := make([]byte, maxDatagram)
	if protocol == "udp" {
		c := g.dialUDP(Gateway4 + ":53")
		defer c.Close()
		_, _ = c.Write(b)
		n, err := c.Read(buf)
		if err != nil {
			g.t.Fatal(err)
		}
		buf = buf[:n]
	} else {
		c := g.dial("[" + Gateway6 + "]:53")
		defer c.Close()
		_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
		if _, err := io.ReadFull(c, buf[:2]); err != nil {
			g.t.Fatal(err)
		}
		buf = buf[:binary.BigEndian.Uint16(buf)]
		if _, err := io.ReadFull(c, buf); err != nil {
			g.t.Fatal(err)
		}
	}
	var answer dnsmessage.Message
	if err := answer.Unpack(buf); err != nil || answer.ID != 4711 {
		g.t.Fatalf("answer %d: %v", answer.ID, err)
	}
	var addrs []string
	for _, r := range answer.Answers {
		switch body := r.Body.(type) {
		case *dnsmessage.AResource:
			addrs = append(addrs, netip.AddrFrom4(body.A).String())
		case *dnsmessage.AAAAResource:
			addrs = append(addrs, netip.AddrFrom16(body.AAAA).String())
		}
	}
	return answer.RCode, addrs
}

func example() zone {
	return zone{
		"good.example.":    {"1.1.1.1", "2606:4700::1111"},
		"alias.example.":   {"good.example.", "1.1.1.2"},
		"rebound.example.": {"127.0.0.1", "10.0.0.1", "8.8.4.4", "169.254.169.254", "::1", "fd00::1", "::ffff:127.0.0.1", "1.1.1.3"},
		"private.example.": {"192.168.1.1"},
	}
}

func TestDNS(t *testing.T) {
	o := newOutside()
	o.own = []string{"8.8.4.4"}
	o.resolver(t, example())
	n := network(t, o, policy.Policy{Mode: policy.Internet, AllowHost: []int{80}})
	g := start(t, n)
	for _, tt := range []struct {
		name string
		kind dnsmessage.Type
		code dnsmessage.RCode
		want []string
	}{
		{"good.example.", dnsmessage.TypeA, 0, []string{"1.1.1.1"}},
		{"GOOD.example.", dnsmessage.TypeAAAA, 0, []string{"2606:4700::1111"}},
		{"alias.example.", dnsmessage.TypeA, 0, []string{"1.1.1.2"}},
		{"alias.example.", dnsmessage.TypeMX, 0, nil},
		{"nowhere.example.", dnsmessage.TypeA, dnsmessage.RCodeNameError, nil},
		{"rebound.example.", dnsmessage.TypeA, 0, []string{"1.1.1.3"}},
		{"rebound.example.", dnsmessage.TypeAAAA, 0, nil},
		{"private.example.", dnsmessage.TypeA, 0, nil},
		{HostName + ".", dnsmessage.TypeA, 0, []string{Gateway4}},
		{HostName + ".", dnsmessage.TypeAAAA, 0, []string{Gateway6}},
	} {
		for _, protocol := range []string{"udp", "tcp"} {
			code, got := g.resolve(protocol, tt.name, tt.kind)
			if code != tt.code || !slices.Equal(got, tt.want) {
				t.Errorf("%s %s %s: %s %v, want %s %v", protocol, tt.name, tt.kind, code, got, tt.code, tt.want)
			}
		}
	}
	if r := n.Report(); r.Reasons[policy.Rebinding] != 6 {
		t.Errorf("%+v", r)
	}
	var why []string
	for _, r := range n.Report().Destinations {
		why = append(why, r.To+" "+r.Why())
	}
	if want := "private.example name of a refused address (192.168.1.1, private)"; !slices.Contains(why, want) || len(why) != 2 {
		t.Errorf("%q, want 2 and %q", why, want)
	}
}

// TestAllowList: listed names are resolved, others are not; and an address is the
// listed name's because our DNS said so, not because the guest says so.
func TestAllowList(t *testing.T) {
	o := newOutside()
	z := example()
	z["later.example."] = []string{"1.1.1.9"}
	o.resolver(t, z)
	server := listen(t, echo)
	for _, to := range []string{"1.1.1.1:443", "1.1.1.1:80", "1.1.1.3:443", "1.1.1.9:443", "9.9.9.9:853"} {
		o.put("tcp", to, server)
	}
	n := network(t, o, policy.Policy{Mode: policy.Internet, Allow: []string{"good.example:443", "rebound.example", "9.9.9.9:853"}})
	g := start(t, n)
	if code, got := g.resolve("udp", "later.example.", dnsmessage.TypeA); code != dnsmessage.RCodeNameError || got != nil {
		t.Errorf("a name that is not listed: %s %v", code, got)
	}
	if _, got := g.resolve("udp", "good.example.", dnsmessage.TypeA); !slices.Equal(got, []string{"1.1.1.1"}) {
		t.Errorf("%v", got)
	}
	if _, got := g.resolve("udp", "rebound.example.", dnsmessage.TypeA); !slices.Equal(got, []string{"8.8.4.4", "1.1.1.3"}) {
		t.Errorf("%v", got)
	}
	for to, want := range map[string]bool{
		"1.1.1.1:443": true, "1.1.1.1:80": false, "1.1.1.3:443": true, "1.1.1.9:443": false, "9.9.9.9:853": true, "10.0.0.1:443": false,
	} {
		c, err := g.tryDial(to)
		if (err == nil) != want {
			t.Errorf("%s: %v", to, err)
		}
		if err == nil {
			_ = c.Close()
		}
	}
}

// TestPrime: a guest that goes on from a checkpoint knows the addresses of listed
// names, and need not ask again.
func TestPrime(t *testing.T) {
	o := newOutside()
	o.resolver(t, example())
	o.put("tcp", "1.1.1.1:443", listen(t, echo))
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet, Allow: []string{"good.example"}}))
	for began := time.Now(); ; {
		c, err := g.tryDial("1.1.1.1:443")
		if err == nil {
			_ = c.Close()
			return
		}
		if time.Since(began) > patience {
			t.Fatal(err)
		}
	}
}

func TestNoNameServer(t *testing.T) {
	o := newOutside()
	o.dns = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.53:53")}
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet}))
	for _, protocol := range []string{"udp", "tcp"} {
		if code, _ := g.resolve(protocol, "good.example.", dnsmessage.TypeA); code != dnsmessage.RCodeServerFailure {
			t.Errorf("%s: %s", protocol, code)
		}
	}
}
