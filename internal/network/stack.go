package network

import (
	"errors"
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
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

// newStack is the gateway: it takes packets to any address, and answers with it.
func newStack(ep *channel.Endpoint) (*stack.Stack, error) {
	ep.LinkEPCapabilities = stack.CapabilityRXChecksumOffload // the link is memory, not a wire
	st := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	sack := tcpip.TCPSACKEnabled(true)
	moderate := tcpip.TCPModerateReceiveBufferOption(true)
	cubic := tcpip.CongestionControlOption("cubic")
	recovery := tcpip.TCPRecovery(0) // gVisor's RACK takes a busy guest for a loss, and slows down
	var errs []error
	for _, option := range []tcpip.SettableTransportProtocolOption{&sack, &moderate, &cubic, &recovery} {
		errs = append(errs, failure(st.SetTransportProtocolOption(tcp.ProtocolNumber, option)))
	}
	errs = append(errs,
		failure(st.CreateNIC(nic, ethernet.New(ep))),
		failure(st.SetPromiscuousMode(nic, true)),
		failure(st.SetSpoofing(nic, true)))
	for _, side := range []struct {
		protocol       tcpip.NetworkProtocolNumber
		gateway, guest string
		prefix         int
	}{{ipv4.ProtocolNumber, Gateway4, Guest4, PrefixLen4}, {ipv6.ProtocolNumber, Gateway6, Guest6, PrefixLen6}} {
		own := tcpip.ProtocolAddress{
			Protocol:          side.protocol,
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: address(side.gateway), PrefixLen: side.prefix},
		}
		errs = append(errs,
			failure(st.AddProtocolAddress(nic, own, stack.AddressProperties{})),
			failure(st.AddStaticNeighbor(nic, side.protocol, address(side.guest), mac(GuestMAC))))
	}
	st.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}, {Destination: header.IPv6EmptySubnet, NIC: nic}})
	if err := errors.Join(errs...); err != nil {
		st.Destroy()
		return nil, err
	}
	return st, nil
}

// handle makes the session take all connections of the guest's. What is neither a
// connection's nor its beginning is answered with a reset by the stack.
func (s *session) handle() {
	connections := tcp.NewForwarder(s.stack, fewRoom, maxHandshake, s.forwardTCP)
	s.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, func(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
		s.noteSYN(id, pkt)
		return connections.HandlePacket(id, pkt)
	})
	flows := udp.NewForwarder(s.stack, s.forwardUDP)
	s.stack.SetTransportProtocolHandler(udp.ProtocolNumber, func(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
		// The stack answers with ICMP, port unreachable, to what is not taken.
		return s.admitUDP(id) && flows.HandlePacket(id, pkt)
	})
}

// failure is the error of the stack as one of Go's.
func failure(err tcpip.Error) error {
	if err == nil {
		return nil
	}
	return errors.New(err.String())
}

func mac(text string) tcpip.LinkAddress {
	hw, err := net.ParseMAC(text)
	if err != nil {
		panic(err) // all are constants
	}
	return tcpip.LinkAddress(hw)
}

func address(text string) tcpip.Address {
	return tcpip.AddrFromSlice(netip.MustParseAddr(text).AsSlice())
}

func netAddr(a tcpip.Address) netip.Addr {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return addr
}

// destination is where the guest wants to go.
func destination(id stack.TransportEndpointID) netip.AddrPort {
	return netip.AddrPortFrom(netAddr(id.LocalAddress), id.LocalPort)
}

// refused counts what has no way out.
func (s *session) refused(protocol string, to netip.Addr) {
	s.refusals.add(protocol, to.String(), policy.Protocol, "")
}
