//go:build linux

package interfaces

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// routes is a conversation with the kernel about devices, addresses and routes,
// as rtnetlink(7) has it.
type routes struct {
	fd  int
	seq uint32
}

// answerTimeout bounds the wait for an answer, which the kernel gives at once
// unless it was lost, in nanoseconds.
const answerTimeout = 5e9

func openRoutes() (*routes, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	tv := unix.NsecToTimeval(answerTimeout)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("setsockopt", err)
	}
	return &routes{fd: fd}, nil
}

func (r *routes) close() { _ = unix.Close(r.fd) }

// up brings the device up.
func (r *routes) up(index, mtu int) error {
	m := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(m[4:], uint32(index))
	binary.NativeEndian.PutUint32(m[8:], unix.IFF_UP)
	binary.NativeEndian.PutUint32(m[12:], unix.IFF_UP) // what is changed
	if mtu > 0 {
		m = attribute(m, unix.IFLA_MTU, binary.NativeEndian.AppendUint32(nil, uint32(mtu)))
	}
	return r.ask("bring it up", unix.RTM_NEWLINK, 0, m)
}

// addAddress adds an address; without a search for others that have it, since
// there are none and it would keep the address from use for a second.
func (r *routes) addAddress(index int, p netip.Prefix) error {
	m := []byte{family(p.Addr()), byte(p.Bits()), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE}
	m = binary.NativeEndian.AppendUint32(m, uint32(index))
	m = attribute(m, unix.IFA_LOCAL, p.Addr().AsSlice())
	m = attribute(m, unix.IFA_ADDRESS, p.Addr().AsSlice())
	return r.ask("add address "+p.String(), unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, m)
}

// addDefault leads everything to the gateway.
func (r *routes) addDefault(index int, gateway netip.Addr) error {
	m := make([]byte, unix.SizeofRtMsg)
	m[0] = family(gateway)
	m[4], m[5], m[6], m[7] = unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST
	m = attribute(m, unix.RTA_GATEWAY, gateway.AsSlice())
	m = attribute(m, unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, uint32(index)))
	return r.ask("add route by "+gateway.String(), unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, m)
}

func family(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// attribute adds one to a message; all of ours are multiples of four bytes long.
func attribute(m []byte, kind uint16, value []byte) []byte {
	m = binary.NativeEndian.AppendUint16(m, uint16(unix.SizeofRtAttr+len(value)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	return append(m, value...)
}

// ask sends a request and waits until it is done.
func (r *routes) ask(what string, kind, flags uint16, body []byte) error {
	r.seq++
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|unix.NLM_F_ACK|flags)
	m = binary.NativeEndian.AppendUint32(m, r.seq)
	m = binary.NativeEndian.AppendUint32(m, 0)
	if err := unix.Sendto(r.fd, append(m, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	buf := make([]byte, 16<<10)
	for {
		n, _, err := unix.Recvfrom(r.fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		list, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		for _, a := range list {
			if a.Header.Seq != r.seq || a.Header.Type != unix.NLMSG_ERROR || len(a.Data) < 4 {
				continue // of a request that was given up
			}
			if errno := -int32(binary.NativeEndian.Uint32(a.Data)); errno != 0 {
				return fmt.Errorf("%s: %w", what, syscall.Errno(errno))
			}
			return nil
		}
	}
}
