package network

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"

	"golang.org/x/net/dns/dnsmessage"
)

// manyAddresses do not fit into a datagram.
const manyAddresses = 100

// zooNames is a name server with bad manners.
type zooNames struct {
	zone zone
	// asked counts the questions for the name that is rebound.
	asked atomic.Int64
}

func newZooNames() *zooNames {
	z := &zooNames{zone: zone{
		"good.example.":        {"9.9.9.9", "2a00::9"},
		"chain.example.":       {"a.example.", "b.example.", "9.9.9.9"},
		"inside.example.":      {"192.168.77.9", "127.0.0.1", "9.9.9.1", "fd00:77::9", "::ffff:10.1.2.3"},
		"insidechain.example.": {"good.example.", "169.254.169.254"},
		"rebind.example.":      {"9.9.9.9"},
		"cut.example.":         {"9.9.9.9"},
	}}
	for i := range manyAddresses {
		z.zone["many.example."] = append(z.zone["many.example."], fmt.Sprintf("9.9.9.%d", 100+i))
	}
	return z
}

func (z *zooNames) answer(query []byte, byUDP bool) []byte {
	b := z.zone.answer(query)
	var m dnsmessage.Message
	if m.Unpack(b) != nil {
		return b
	}
	switch name := m.Questions[0].Name.String(); {
	case strings.HasPrefix(name, "garbage."):
		b = append(b[:len(query)], 0xff, 0xc0, 0xff, 1, 2, 3)
		b[7] = 9 // answers, it says
		return b
	case strings.HasPrefix(name, "cut."):
		b[2] |= 2
		return b[:len(b)-3]
	case strings.HasPrefix(name, "rebind.") && z.asked.Add(1) > 1:
		return zone{name: {"127.0.0.1"}}.answer(query)
	case byUDP && len(b) > 512:
		m.Answers, m.Truncated = nil, true
		b, _ = m.Pack()
	}
	return b
}

func (z *zooNames) datagram(query []byte) []byte {
	return z.answer(query, true)
}

func (z *zooNames) serve(c *net.TCPConn) {
	defer c.Close()
	for {
		var size [2]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(c, query); err != nil {
			return
		}
		b := z.answer(query, false)
		_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
	}
}
