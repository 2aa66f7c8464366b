//go:build linux

package interfaces

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/netlink"
)

// routes is a conversation with the kernel about devices, addresses and routes,
// as rtnetlink(7) has it.
type routes struct{ *netlink.Conn }

// up brings the device up.
func (r routes) up(index, mtu int) error {
	m := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(m[4:], uint32(index))
	binary.NativeEndian.PutUint32(m[8:], unix.IFF_UP)
	binary.NativeEndian.PutUint32(m[12:], unix.IFF_UP) // what is changed
	if mtu > 0 {
		m = netlink.Attribute(m, unix.IFLA_MTU, binary.NativeEndian.AppendUint32(nil, uint32(mtu)))
	}
	return r.ask("bring it up", unix.RTM_NEWLINK, 0, m)
}

// addAddress adds an address; without a search for others that have it, since
// there are none and it would keep the address from use for a second.
func (r routes) addAddress(index int, p netip.Prefix) error {
	m := []byte{family(p.Addr()), byte(p.Bits()), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE}
	m = binary.NativeEndian.AppendUint32(m, uint32(index))
	m = netlink.Attribute(m, unix.IFA_LOCAL, p.Addr().AsSlice())
	m = netlink.Attribute(m, unix.IFA_ADDRESS, p.Addr().AsSlice())
	return r.ask("add address "+p.String(), unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, m)
}

// addDefault leads everything to the gateway.
func (r routes) addDefault(index int, gateway netip.Addr) error {
	m := make([]byte, unix.SizeofRtMsg)
	m[0] = family(gateway)
	m[4], m[5], m[6], m[7] = unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST
	m = netlink.Attribute(m, unix.RTA_GATEWAY, gateway.AsSlice())
	m = netlink.Attribute(m, unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, uint32(index)))
	return r.ask("add route by "+gateway.String(), unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, m)
}

func family(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// ask sends a request and waits until it is done.
func (r routes) ask(what string, kind, flags uint16, body []byte) error {
	if err := r.Ask(kind, unix.NLM_F_ACK|flags, body, nil); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
