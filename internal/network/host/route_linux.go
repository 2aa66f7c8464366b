package host

import (
	"encoding/binary"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// routeTimeout bounds the kernel's answer, which comes at once.
const routeTimeout = time.Second

// comesBack asks the kernel whether a packet to the address is delivered to the
// host itself, or to all of a subnet: no list of interfaces knows all such
// addresses (`ip route add local`). An address that has no route does not.
func comesBack(a netip.Addr) (bool, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval(routeTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return false, os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Sendto(fd, routeRequest(a), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return false, os.NewSyscallError("sendto", err)
	}
	buf := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, buf, 0)
	for err == unix.EINTR { // a receive with a limit is not restarted by the kernel
		n, _, err = unix.Recvfrom(fd, buf, 0)
	}
	if err != nil {
		return false, os.NewSyscallError("recvfrom", err)
	}
	const routeType = unix.SizeofNlMsghdr + 7 // of struct rtmsg, rtnetlink(7)
	switch {
	case n < unix.SizeofNlMsghdr+unix.SizeofRtMsg:
		return false, unix.EBADMSG
	case binary.NativeEndian.Uint16(buf[4:]) != unix.RTM_NEWROUTE:
		return false, nil // an error: there is no route
	}
	switch buf[routeType] {
	case unix.RTN_LOCAL, unix.RTN_BROADCAST, unix.RTN_ANYCAST, unix.RTN_MULTICAST:
		return true, nil
	}
	return false, nil
}

// routeRequest asks for the route to the address.
func routeRequest(a netip.Addr) []byte {
	dst := a.AsSlice()
	family := byte(unix.AF_INET6)
	if a.Is4() {
		family = unix.AF_INET
	}
	size := unix.SizeofNlMsghdr + unix.SizeofRtMsg + unix.SizeofRtAttr + len(dst)
	m := binary.NativeEndian.AppendUint32(nil, uint32(size))
	m = binary.NativeEndian.AppendUint16(m, unix.RTM_GETROUTE)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST)
	m = append(m, make([]byte, 8)...) // sequence and port: the only request
	route := make([]byte, unix.SizeofRtMsg)
	route[0], route[1] = family, byte(8*len(dst))
	m = append(m, route...)
	m = binary.NativeEndian.AppendUint16(m, uint16(unix.SizeofRtAttr+len(dst)))
	m = binary.NativeEndian.AppendUint16(m, unix.RTA_DST)
	return append(m, dst...)
}
