// Package network is the network of one machine, in this process and without
// privileges: it ends the guest's connections in a network stack of its own and
// makes others, from the host, for those that the machine's rules allow. It is
// no router: no packet of the guest's leaves, and nothing outside can begin a
// connection to the guest.
//
// On the link are one guest and one gateway, at fixed addresses. The gateway
// answers DNS, and connections to it at an allowed port reach the host's loopback.
package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/holdpoint/holdpoint/internal/network/names"
	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// The addresses on a machine's link are the same for all machines, since each
// has a link of its own and a checkpoint goes on with the address it had. The
// IPv4 ones are of a block that is refused everywhere (RFC 2544), so that they
// hide nothing; the IPv6 ones are unique local addresses (RFC 4193).
const (
	GuestMAC     = "52:54:00:68:70:02"
	GatewayMAC   = "52:54:00:68:70:01"
	Guest4       = "198.18.0.2"
	Gateway4     = "198.18.0.1"
	Guest6       = "fd68:6f6c:6470::2"
	Gateway6     = "fd68:6f6c:6470::1"
	PrefixLen4   = 30
	PrefixLen6   = 64
	HostName     = "host.holdpoint.internal"
	dnsPort      = 53
	nic          = 1
	sendQueue    = 4096 // frames; what does not fit is lost, as on any network
	dialTimeout  = 30 * time.Second
	keepIdle     = 2 * time.Minute
	udpIdle      = time.Minute // longer than a DNS client waits, as long as QUIC's usual idle time-out
	maxTCP       = 4096
	maxUDP       = 2048
	maxHandshake = maxTCP + 1024 // more than are let in, so that the others are told
)

// MTU is the largest IP packet on the link, in bytes, on both sides: large ones
// cost the guest less, and none of them leaves the host as it is.
const MTU = 16384

// Host is the outside as the host of the machine sees it.
type Host interface {
	// IsHost reports whether the address is one of the host's own.
	IsHost(a netip.Addr) bool
	// IsBroadcast reports whether packets to the address go to more than one host.
	IsBroadcast(a netip.Addr) bool
	// Dial connects by policy.TCP or policy.UDP; nothing is refused here.
	Dial(ctx context.Context, protocol string, to netip.AddrPort) (net.Conn, error)
	// Nameservers are those that the host asks itself, the first one first.
	Nameservers() []netip.AddrPort
}

// Config is what the network of a machine needs.
type Config struct {
	Rules policy.Rules
	Host  Host
}

// Network is the network of one machine. Its life: New, then Serve for each
// link that is made to the guest, with Report at any time. Links follow each
// other as processes of the machine do; of what was connected by one, nothing
// is left in the next, and the guest is told so by a reset at its next segment.
type Network struct {
	cfg      Config
	names    *names.Server
	refusals *refusals
	limits   limits
}

// limits bound what one machine takes of its host.
type limits struct {
	// tcp and udp are the connections and flows at the same time.
	tcp, udp int
	// idle is how long a flow stays without a datagram.
	idle time.Duration
	// dial is how long the other side of a connection may take to answer.
	dial time.Duration
	// keep is how long a guest that has said its last word is not asked whether it
	// still listens.
	keep time.Duration
}

// New makes the network of a machine; nothing happens before Serve.
func New(cfg Config) *Network {
	n := &Network{cfg: cfg, refusals: newRefusals(), limits: limits{maxTCP, maxUDP, udpIdle, dialTimeout, keepIdle}}
	n.names = names.New(names.Config{
		Rules: cfg.Rules, Host: cfg.Host, HostName: HostName,
		Gateways: []netip.Addr{netip.MustParseAddr(Gateway4), netip.MustParseAddr(Gateway6)},
		Refused:  func(name string, why policy.Reason, what string) { n.refusals.add("dns", name, why, what) },
	})
	return n
}

// Report gives what was refused so far.
func (n *Network) Report() Report { return n.refusals.report() }

// Serve is the outside of a guest's link until the link or ctx ends; then all of the
// guest's connections have ended, and nothing is left running. conn carries
// ethernet frames, each behind its length in four bytes, big-endian, which is
// what QEMU's stream and socket backends speak; Serve closes it. The error is
// nil when ctx or the other side has ended it.
func (n *Network) Serve(ctx context.Context, conn net.Conn) error {
	defer func() { _ = conn.Close() }()
	ep := channel.New(sendQueue, MTU+14, mac(GatewayMAC))
	st, err := newStack(ep)
	if err != nil {
		return fmt.Errorf("make network stack: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &session{Network: n, stack: st, ctx: ctx, syns: make(map[stack.TransportEndpointID]uint32)}
	s.handle()
	unwatch := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer unwatch()

	var sender sync.WaitGroup
	sender.Go(func() {
		defer cancel()
		send(ctx, ep, conn)
	})
	s.start(func() { n.names.Prime(ctx) })
	err = receive(conn, func(frame []byte) {
		if s.takes(frame) {
			inject(ep, frame)
		}
	})
	ended := ctx.Err() != nil || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed)
	cancel()
	s.end()
	st.Close()
	ep.Close()
	s.work.Wait()
	st.Wait()
	sender.Wait()
	if ended {
		return nil
	}
	return fmt.Errorf("serve network link: %w", err)
}

// session is one link's life.
type session struct {
	*Network
	stack *stack.Stack
	ctx   context.Context // the session's, which ends all work
	// buffers are of type *datagram.
	buffers sync.Pool

	mu       sync.Mutex
	ended    bool
	tcp, udp int
	// syns has the sequence number of each connection that the guest begins.
	syns map[stack.TransportEndpointID]uint32
	work sync.WaitGroup
}

// enter counts work of the kind n up, and says to how much, unless there is too
// much of it or the session has ended. Each true is followed by one leave.
func (s *session) enter(n *int, most int) (now int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || *n >= most {
		return *n, false
	}
	*n++
	s.work.Add(1)
	return *n, true
}

func (s *session) leave(n *int) {
	s.mu.Lock()
	*n--
	s.mu.Unlock()
	s.work.Done()
}

// start runs f as a part of the session.
func (s *session) start(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.work.Go(f)
	}
}

func (s *session) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
}
