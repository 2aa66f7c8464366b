// Package host is the outside of machines as this host sees it: its addresses,
// its name servers, and connections made from it. It refuses nothing.
package host

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
)

// Host is the host's own network, as the process's network namespace has it.
type Host struct{}

// IsHost reports whether the address leads back to the host: an interface has
// it, or it is a subnet's broadcast address, or the kernel delivers it here for
// another reason. When that cannot be found out, each address is the host's.
func (Host) IsHost(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	own, err := net.InterfaceAddrs()
	if err != nil {
		return true
	}
	for _, n := range own {
		if n, ok := n.(*net.IPNet); ok && covers(n, a) {
			return true
		}
	}
	back, err := comesBack(a)
	return back || err != nil
}

// covers reports whether the address is that of the interface, or the broadcast
// address of its subnet.
func covers(n *net.IPNet, a netip.Addr) bool {
	own, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return false
	}
	own = own.Unmap()
	if own == a {
		return true
	}
	ones, bits := n.Mask.Size()
	if !own.Is4() || !a.Is4() || bits != 32 || ones > 30 {
		return false
	}
	last := own.As4()
	for i := ones; i < 32; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return a == netip.AddrFrom4(last)
}

// Dial connects. The connection is a *net.TCPConn or *net.UDPConn.
func (Host) Dial(ctx context.Context, protocol string, to netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, protocol, to.String())
}

// Nameservers are those of /etc/resolv.conf, or the one that resolv.conf(5) means when
// there are none. The file is read each time, since networks come and go.
func (Host) Nameservers() []netip.AddrPort {
	f, err := os.Open("/etc/resolv.conf")
	if err != nil {
		return nameservers(strings.NewReader(""))
	}
	defer f.Close()
	return nameservers(io.LimitReader(f, 64<<10))
}

func nameservers(conf io.Reader) []netip.AddrPort {
	var servers []netip.AddrPort
	lines := bufio.NewScanner(conf)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if addr, err := netip.ParseAddr(fields[1]); err == nil && len(servers) < 3 {
			servers = append(servers, netip.AddrPortFrom(addr, 53))
		}
	}
	if servers == nil {
		return []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 53)}
	}
	return servers
}
