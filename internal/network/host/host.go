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
// it, or the kernel delivers it here for another reason. When that cannot be found
// out, each address is the host's.
func (Host) IsHost(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	own, err := net.InterfaceAddrs()
	if err != nil {
		return true
	}
	for _, n := range own {
		if n, ok := n.(*net.IPNet); ok && addressOf(n) == a {
			return true
		}
	}
	to, err := lookUp(a)
	return err != nil || to == here
}

// IsBroadcast reports whether packets to the address go to all of a subnet, or to
// others besides the host. When that cannot be found out, all do.
func (Host) IsBroadcast(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	own, err := net.InterfaceAddrs()
	if err != nil {
		return true
	}
	for _, n := range own {
		if n, ok := n.(*net.IPNet); ok && isLast(n, a) {
			return true
		}
	}
	to, err := lookUp(a)
	return err != nil || to == many
}

func addressOf(n *net.IPNet) netip.Addr {
	a, _ := netip.AddrFromSlice(n.IP)
	return a.Unmap()
}

// isLast reports whether the address is the last one of the subnet, and not the
// interface's own.
func isLast(n *net.IPNet, a netip.Addr) bool {
	own := addressOf(n)
	ones, bits := n.Mask.Size()
	if own == a || !own.Is4() || !a.Is4() || bits != 32 || ones > 30 {
		return false
	}
	last := own.As4()
	for i := ones; i < 32; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return a == netip.AddrFrom4(last)
}

// way is where the kernel sends what is sent to an address.
type way int

const (
	elsewhere way = iota
	here
	many
)

// Dial connects. The connection is a *net.TCPConn or *net.UDPConn. It is refused for
// what is a broadcast address to the kernel.
func (Host) Dial(ctx context.Context, protocol string, to netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{Control: withoutBroadcast}
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
