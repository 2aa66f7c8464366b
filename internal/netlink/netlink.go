//go:build linux

// Package netlink asks the kernel over netlink(7) sockets: one request at a time,
// and its answers. What the messages say is its users' business.
package netlink

import (
	"encoding/binary"
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Timeout is how long an answer is usually waited for: the kernel gives it at once
// unless it was lost.
const Timeout = 5 * time.Second

// Conn is a conversation with the kernel, for one goroutine at a time. Open makes
// it, Close ends it.
type Conn struct {
	fd  int
	seq uint32
}

// Open begins one by a protocol, such as unix.NETLINK_ROUTE, with the network
// namespace that the thread is in. An answer is waited for as long as timeout.
func Open(protocol int, timeout time.Duration) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	limit := unix.NsecToTimeval(timeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("setsockopt", err)
	}
	return &Conn{fd: fd}, nil
}

// Close ends the conversation.
func (c *Conn) Close() { _ = unix.Close(c.fd) }

// Ask sends one request, whose flags have NLM_F_ACK or NLM_F_DUMP, and calls visit
// with the content of each answer until the last one; nil for requests that have
// none. What the kernel refuses is a syscall.Errno as it is, other errors wrap one.
func (c *Conn) Ask(kind, flags uint16, body []byte, visit func([]byte)) error {
	c.seq++
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|flags)
	m = binary.NativeEndian.AppendUint32(m, c.seq)
	m = binary.NativeEndian.AppendUint32(m, 0)
	if err := unix.Sendto(c.fd, append(m, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	buf := make([]byte, 16<<10)
	for {
		n, _, err := unix.Recvfrom(c.fd, buf, 0)
		if errors.Is(err, unix.EINTR) { // a receive with a limit is not restarted by the kernel
			continue
		}
		if err != nil {
			return os.NewSyscallError("recvfrom", err)
		}
		list, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return os.NewSyscallError("parse netlink message", err)
		}
		for _, a := range list {
			switch {
			case a.Header.Seq != c.seq: // of a request that was given up
			case a.Header.Type == unix.NLMSG_ERROR || a.Header.Type == unix.NLMSG_DONE:
				return refusal(a)
			case visit != nil:
				visit(a.Data)
			}
		}
	}
}

// refusal is how a request ended: a negative errno, 0 for well.
func refusal(a syscall.NetlinkMessage) error {
	if len(a.Data) < 4 {
		return nil
	}
	if errno := -int32(binary.NativeEndian.Uint32(a.Data)); errno != 0 {
		return syscall.Errno(errno)
	}
	return nil
}

// Attribute adds one to a message; all of ours are multiples of four bytes long.
func Attribute(m []byte, kind uint16, value []byte) []byte {
	m = binary.NativeEndian.AppendUint16(m, uint16(unix.SizeofRtAttr+len(value)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	return append(m, value...)
}
