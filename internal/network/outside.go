package network

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// gateway reports whether the address is ours on the link.
func gateway(a netip.Addr) bool {
	return a == netip.MustParseAddr(Gateway4) || a == netip.MustParseAddr(Gateway6)
}

// isDNS reports whether the name server is meant.
func isDNS(to netip.AddrPort) bool { return gateway(to.Addr()) && to.Port() == dnsPort }

// allowed decides, and counts what is refused. Only the guest's own addresses have a
// way out: answers to others would not find it.
func (s *session) allowed(protocol string, id stack.TransportEndpointID) bool {
	to := destination(id)
	why := policy.Reason("")
	switch {
	case id.RemoteAddress != address(Guest4) && id.RemoteAddress != address(Guest6):
		why = policy.Protocol
	case isDNS(to):
	case gateway(to.Addr()):
		if !s.cfg.Rules.HostPort(to.Port()) {
			why = policy.Host
		}
	default:
		why = s.cfg.Rules.Decide(s.names, protocol, to)
	}
	if why != "" {
		s.refusals.add(protocol, to.String(), why, "")
	}
	return why == ""
}

// dial makes the connection outside that was allowed.
func (s *session) dial(protocol string, to netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(s.ctx, s.limits.dial)
	defer cancel()
	if !gateway(to.Addr()) {
		return s.cfg.Host.Dial(ctx, protocol, to)
	}
	// A server of the host's loopback listens on either address, or both.
	conn, err := s.cfg.Host.Dial(ctx, protocol, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), to.Port()))
	if err == nil {
		return conn, nil
	}
	conn, err6 := s.cfg.Host.Dial(ctx, protocol, netip.AddrPortFrom(netip.IPv6Loopback(), to.Port()))
	if err6 != nil {
		return nil, errors.Join(err, err6)
	}
	return conn, nil
}
