package network

import (
	"encoding/binary"
	"errors"
	"sync"
	"syscall"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// obstacle is why something does not arrive.
type obstacle int

const (
	networkUnreachable obstacle = iota
	hostUnreachable
	prohibited
	portUnreachable
)

// codes are those of ICMP (RFC 792, RFC 1812) and of ICMPv6 (RFC 4443).
func (o obstacle) codes() (v4 header.ICMPv4Code, v6 header.ICMPv6Code) {
	switch o {
	case networkUnreachable:
		return header.ICMPv4NetUnreachable, header.ICMPv6NetworkUnreachable
	case prohibited:
		return header.ICMPv4AdminProhibited, header.ICMPv6Prohibited
	case portUnreachable:
		return header.ICMPv4PortUnreachable, header.ICMPv6PortUnreachable
	}
	return header.ICMPv4HostUnreachable, header.ICMPv6AddressUnreachable
}

// unreachableBy is what the host's kernel was told, or knows by itself.
func unreachableBy(err error) (why obstacle, ok bool) {
	for errno, why := range map[syscall.Errno]obstacle{
		syscall.ENETUNREACH: networkUnreachable, syscall.EHOSTUNREACH: hostUnreachable,
		syscall.EACCES: prohibited, syscall.EPERM: prohibited, syscall.ECONNREFUSED: portUnreachable,
	} {
		if errors.Is(err, errno) {
			return why, true
		}
	}
	return 0, false
}

// noteSYN remembers what a connection that begins is told to be unreachable by:
// the guest believes only who knows its sequence number.
func (s *session) noteSYN(id stack.TransportEndpointID, pkt *stack.PacketBuffer) {
	h := header.TCP(pkt.TransportHeader().Slice())
	if len(h) < header.TCPMinimumSize || h.Flags() != header.TCPFlagSyn {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, again := s.syns[id]; again || len(s.syns) < maxHandshake {
		s.syns[id] = h.SequenceNumber()
	}
}

// notedSYN is what was noted; forget is called once the guest was answered, or will
// not be: it may repeat itself until then.
func (s *session) notedSYN(id stack.TransportEndpointID) (seq uint32, ok bool, forget func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seq, ok = s.syns[id]
	return seq, ok, sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.syns, id)
	})
}

// tellUnreachable sends what a router sends to whom it cannot serve, with the
// beginning of what the guest has sent: the second word of the transport header
// is a sequence number (TCP), or of no interest (UDP).
func (s *session) tellUnreachable(protocol tcpip.TransportProtocolNumber, id stack.TransportEndpointID, second uint32, why obstacle) {
	transport := make([]byte, 8)
	binary.BigEndian.PutUint16(transport, id.RemotePort)
	binary.BigEndian.PutUint16(transport[2:], id.LocalPort)
	binary.BigEndian.PutUint32(transport[4:], second)
	code4, code6 := why.codes()
	packet, network := []byte(nil), ipv4.ProtocolNumber
	if id.RemoteAddress.Len() == header.IPv4AddressSize {
		quoted := append(ipv4Header(id.RemoteAddress, id.LocalAddress, uint8(protocol), len(transport)), transport...)
		message := append(make(header.ICMPv4, header.ICMPv4MinimumSize), quoted...)
		message.SetType(header.ICMPv4DstUnreachable)
		message.SetCode(code4)
		message.SetChecksum(^checksum.Checksum(message, 0))
		packet = append(ipv4Header(address(Gateway4), id.RemoteAddress, uint8(header.ICMPv4ProtocolNumber), len(message)), message...)
	} else {
		network = ipv6.ProtocolNumber
		quoted := append(ipv6Header(id.RemoteAddress, id.LocalAddress, protocol, len(transport)), transport...)
		message := append(make(header.ICMPv6, header.ICMPv6DstUnreachableMinimumSize), quoted...)
		message.SetType(header.ICMPv6DstUnreachable)
		message.SetCode(code6)
		message.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: message, Src: address(Gateway6), Dst: id.RemoteAddress}))
		packet = append(ipv6Header(address(Gateway6), id.RemoteAddress, header.ICMPv6ProtocolNumber, len(message)), message...)
	}
	// A packet that finds no room is lost, as on any network.
	_ = s.stack.WritePacketToRemote(nic, mac(GuestMAC), network, buffer.MakeWithData(packet))
}

const timeToLive = 64

func ipv4Header(from, to tcpip.Address, protocol uint8, size int) []byte {
	h := make(header.IPv4, header.IPv4MinimumSize)
	h.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(h) + size), TTL: timeToLive, Protocol: protocol, SrcAddr: from, DstAddr: to,
	})
	h.SetChecksum(^h.CalculateChecksum())
	return h
}

func ipv6Header(from, to tcpip.Address, protocol tcpip.TransportProtocolNumber, size int) []byte {
	h := make(header.IPv6, header.IPv6MinimumSize)
	h.Encode(&header.IPv6Fields{
		PayloadLength: uint16(size), TransportProtocol: protocol, HopLimit: timeToLive, SrcAddr: from, DstAddr: to,
	})
	return h
}
