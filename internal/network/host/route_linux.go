package host

import (
	"bytes"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/netlink"
)

// routeTimeout bounds the kernel's answer, which comes at once.
const routeTimeout = time.Second

// lookUp asks the kernel where a packet to the address goes: no list of interfaces
// knows all addresses of the host (`ip route add local`). An address that has no
// route is elsewhere.
func lookUp(a netip.Addr) (way, error) {
	conn, err := netlink.Open(unix.NETLINK_ROUTE, routeTimeout)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	var route []byte
	err = conn.Ask(unix.RTM_GETROUTE, unix.NLM_F_ACK, routeRequest(a), func(answer []byte) { route = bytes.Clone(answer) })
	if _, refused := err.(syscall.Errno); refused {
		return elsewhere, nil // there is no route
	}
	if err == nil && len(route) < unix.SizeofRtMsg {
		err = unix.EBADMSG
	}
	if err != nil {
		return 0, fmt.Errorf("look for the route to %s: %w", a, err)
	}
	switch route[7] { // of struct rtmsg, rtnetlink(7)
	case unix.RTN_LOCAL:
		return here, nil
	case unix.RTN_BROADCAST, unix.RTN_ANYCAST, unix.RTN_MULTICAST:
		return many, nil
	}
	return elsewhere, nil
}

// withoutBroadcast takes back what package net allows every UDP socket.
func withoutBroadcast(_, _ string, conn syscall.RawConn) error {
	var failed error
	err := conn.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 0) })
	if err != nil {
		return err
	}
	return failed
}

// routeRequest asks for the route to the address.
func routeRequest(a netip.Addr) []byte {
	dst := a.AsSlice()
	family := byte(unix.AF_INET6)
	if a.Is4() {
		family = unix.AF_INET
	}
	route := make([]byte, unix.SizeofRtMsg)
	route[0], route[1] = family, byte(8*len(dst))
	return netlink.Attribute(route, unix.RTA_DST, dst)
}
