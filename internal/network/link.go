package network

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	// maxFrame is more than QEMU ever sends; a greater length means that the
	// sides have lost each other.
	maxFrame   = 1 << 17
	readBuffer = 256 << 10
	// batch is how many frames are written at once, at most.
	batch = 64
)

// receive calls deliver for each frame until the connection ends, with io.EOF
// when it does so between two frames. The frame is deliver's until it returns.
func receive(conn io.Reader, deliver func(frame []byte)) error {
	r := bufio.NewReaderSize(conn, readBuffer)
	frame := make([]byte, 0, MTU)
	var length [4]byte
	for {
		if _, err := io.ReadFull(r, length[:]); err != nil {
			return err
		}
		n := binary.BigEndian.Uint32(length[:])
		if n > maxFrame {
			return fmt.Errorf("a frame of %d bytes, at most %d", n, maxFrame)
		}
		if int(n) > cap(frame) {
			frame = make([]byte, n)
		}
		frame = frame[:n]
		if _, err := io.ReadFull(r, frame); err != nil {
			return fmt.Errorf("read frame of %d bytes: %w", n, err)
		}
		deliver(frame)
	}
}

// inject gives a copy of the frame to the stack.
func inject(ep *channel.Endpoint, frame []byte) {
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(buffer.NewViewWithData(frame))})
	ep.InjectInbound(0, pkt) // the protocol is in the frame
	pkt.DecRef()
}

// send writes what the stack sends until ctx or the connection ends.
func send(ctx context.Context, ep *channel.Endpoint, conn net.Conn) {
	var lengths [batch][4]byte
	for {
		pkt := ep.ReadContext(ctx)
		var bufs net.Buffers
		var pkts []*stack.PacketBuffer
		for ; pkt != nil; pkt = ep.Read() {
			binary.BigEndian.PutUint32(lengths[len(pkts)][:], uint32(pkt.Size()))
			bufs = append(append(bufs, lengths[len(pkts)][:]), pkt.AsSlices()...)
			if pkts = append(pkts, pkt); len(pkts) == batch {
				break
			}
		}
		if pkts == nil {
			return
		}
		_, err := bufs.WriteTo(conn)
		for _, pkt := range pkts {
			pkt.DecRef()
		}
		if err != nil {
			return
		}
	}
}

// takes reports whether a frame of the guest's is for the stack. ICMP to any but
// the gateway is not: the stack would answer an echo in the name of the whole world.
func (s *session) takes(frame []byte) bool {
	if len(frame) < header.EthernetMinimumSize {
		return false
	}
	eth := header.Ethernet(frame)
	if dst := eth.DestinationAddress(); dst != mac(GatewayMAC) && dst[0]&1 == 0 {
		return false
	}
	packet := frame[header.EthernetMinimumSize:]
	switch eth.Type() {
	case header.ARPProtocolNumber:
		return true
	case header.IPv4ProtocolNumber:
		ip := header.IPv4(packet)
		if len(packet) < header.IPv4MinimumSize {
			return false
		}
		if ip.Protocol() != uint8(header.ICMPv4ProtocolNumber) || ip.DestinationAddress() == address(Gateway4) {
			return true
		}
		s.refused("icmp", netAddr(ip.DestinationAddress()))
	case header.IPv6ProtocolNumber:
		ip := header.IPv6(packet)
		if len(packet) < header.IPv6MinimumSize {
			return false
		}
		to := netAddr(ip.DestinationAddress())
		if !mayBeICMP6(ip.NextHeader(), packet[header.IPv6MinimumSize:]) || ip.DestinationAddress() == address(Gateway6) || to.IsMulticast() || to.IsLinkLocalUnicast() {
			return true
		}
		s.refused("icmp", to)
	}
	return false
}

// mayBeICMP6 reports whether a packet carries ICMPv6, also behind extension headers
// (RFC 8200), or may do: of a later fragment that cannot be told.
func mayBeICMP6(next uint8, rest []byte) bool {
	for {
		switch header.IPv6ExtensionHeaderIdentifier(next) {
		case header.IPv6HopByHopOptionsExtHdrIdentifier, header.IPv6RoutingExtHdrIdentifier, header.IPv6DestinationOptionsExtHdrIdentifier:
			if len(rest) < 2 || len(rest) < 8*(int(rest[1])+1) {
				return true
			}
			next, rest = rest[0], rest[8*(int(rest[1])+1):]
		case header.IPv6FragmentExtHdrIdentifier:
			return len(rest) < 8 || rest[0] != uint8(header.UDPProtocolNumber) && rest[0] != uint8(header.TCPProtocolNumber)
		default:
			return next == uint8(header.ICMPv6ProtocolNumber)
		}
	}
}
