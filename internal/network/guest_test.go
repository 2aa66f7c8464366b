package network

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// patience bounds what a test waits for.
const patience = 20 * time.Second

// outside is a world of servers on this host's loopback, at addresses of their own.
type outside struct {
	mu sync.Mutex
	// servers are by protocol and address; others do not answer.
	servers map[string]string
	own     []string
	// errs are what the host's kernel answers for others.
	errs map[string]error
	// dialed counts what was tried.
	dialed map[string]int
	dns    []netip.AddrPort
}

func newOutside() *outside {
	return &outside{servers: make(map[string]string), dialed: make(map[string]int)}
}

func (o *outside) put(protocol, to string, at net.Addr) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.servers[protocol+" "+to] = at.String()
}

func (o *outside) tried(protocol, to string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.dialed[protocol+" "+to]
}

func (o *outside) IsHost(a netip.Addr) bool {
	for _, own := range o.own {
		if a == netip.MustParseAddr(own) {
			return true
		}
	}
	return false
}

func (o *outside) IsBroadcast(a netip.Addr) bool { return a == netip.MustParseAddr("8.8.7.255") }

func (o *outside) Dial(ctx context.Context, protocol string, to netip.AddrPort) (net.Conn, error) {
	o.mu.Lock()
	at, errno := o.servers[protocol+" "+to.String()], o.errs[protocol+" "+to.String()]
	o.dialed[protocol+" "+to.String()]++
	o.mu.Unlock()
	if errno != nil {
		return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", errno)}
	}
	if at == "" && protocol == policy.TCP && to.Port() == 81 {
		<-ctx.Done() // a black hole
		return nil, ctx.Err()
	}
	if at == "" {
		return nil, errors.New("no route")
	}
	var d net.Dialer
	return d.DialContext(ctx, protocol, at)
}

func (o *outside) Nameservers() []netip.AddrPort { return o.dns }

// guest is a machine: a network stack, and the device that its link is plugged into.
type guest struct {
	t     *testing.T
	stack *stack.Stack
	ep    *channel.Endpoint
}

func newGuest(t *testing.T) *guest {
	g := &guest{t: t, ep: channel.New(4096, MTU+14, mac(GuestMAC))}
	g.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	t.Cleanup(g.stack.Destroy)
	check := func(err tcpip.Error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	sack := tcpip.TCPSACKEnabled(true)
	check(g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack))
	check(g.stack.CreateNIC(nic, ethernet.New(g.ep)))
	for protocol, own := range map[tcpip.NetworkProtocolNumber]string{ipv4.ProtocolNumber: Guest4, ipv6.ProtocolNumber: Guest6} {
		prefix := PrefixLen4
		if protocol == ipv6.ProtocolNumber {
			prefix = PrefixLen6
		}
		check(g.stack.AddProtocolAddress(nic, tcpip.ProtocolAddress{
			Protocol: protocol, AddressWithPrefix: tcpip.AddressWithPrefix{Address: address(own), PrefixLen: prefix},
		}, stack.AddressProperties{}))
	}
	g.stack.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, Gateway: address(Gateway4), NIC: nic},
		{Destination: header.IPv6EmptySubnet, Gateway: address(Gateway6), NIC: nic},
	})
	return g
}

// pair is a connected pair of stream sockets, as between QEMU and a monitor.
func pair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "link")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	return ends[0], ends[1]
}

// plug makes a link between the guest and n, until unplug is called, which waits
// until the network has let go of everything.
func (g *guest) plug(n *Network) (unplug func()) {
	g.t.Helper()
	device, monitor := pair(g.t)
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		if err := n.Serve(ctx, monitor); err != nil {
			g.t.Error(err)
		}
	})
	all.Go(func() { _ = receive(device, func(frame []byte) { inject(g.ep, frame) }) })
	all.Go(func() { send(ctx, g.ep, device) })
	return sync.OnceFunc(func() {
		cancel()
		_ = device.Close()
		done := make(chan struct{})
		go func() {
			defer close(done)
			all.Wait()
		}()
		select {
		case <-done:
		case <-time.After(patience):
			g.t.Error("the link does not end")
		}
	})
}

// start is a guest whose link is plugged in for the time of the test.
func start(t *testing.T, n *Network) *guest {
	t.Helper()
	g := newGuest(t)
	t.Cleanup(g.plug(n))
	return g
}

func network(t *testing.T, o *outside, p policy.Policy) *Network {
	t.Helper()
	rules, err := p.Compile()
	if err != nil {
		t.Fatal(err)
	}
	return New(Config{Rules: rules, Host: o})
}

func full(to string) (tcpip.FullAddress, tcpip.NetworkProtocolNumber) {
	ap := netip.MustParseAddrPort(to)
	protocol := ipv4.ProtocolNumber
	if ap.Addr().Is6() {
		protocol = ipv6.ProtocolNumber
	}
	return tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(ap.Addr().AsSlice()), Port: ap.Port()}, protocol
}

func (g *guest) tryDial(to string) (*gonet.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	addr, protocol := full(to)
	return gonet.DialContextTCP(ctx, g.stack, addr, protocol)
}

func (g *guest) dial(to string) *gonet.TCPConn {
	g.t.Helper()
	conn, err := g.tryDial(to)
	if err != nil {
		g.t.Fatalf("dial %s: %v", to, err)
	}
	_ = conn.SetDeadline(time.Now().Add(patience))
	return conn
}

func (g *guest) dialUDP(to string) *gonet.UDPConn {
	g.t.Helper()
	addr, protocol := full(to)
	conn, err := gonet.DialUDP(g.stack, nil, &addr, protocol)
	if err != nil {
		g.t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(patience))
	return conn
}

// listen serves each connection to the loopback by serve, until the test ends.
func listen(t *testing.T, serve func(*net.TCPConn)) net.Addr {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				serve(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return l.Addr()
}

// listenUDP answers each datagram by what answer makes of it.
func listenUDP(t *testing.T, answer func([]byte) []byte) net.Addr {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		buf := make([]byte, maxDatagram)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			if reply := answer(buf[:n]); reply != nil {
				_, _ = c.WriteTo(reply, from)
			}
		}
	})
	t.Cleanup(func() {
		_ = c.Close()
		all.Wait()
	})
	return c.LocalAddr()
}
