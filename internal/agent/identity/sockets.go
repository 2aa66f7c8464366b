//go:build linux

package identity

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// The messages of sock_diag(7), include/uapi/linux/inet_diag.h.
const (
	// socketID is sizeof(struct inet_diag_sockid): ports at 0 and 2,
	// addresses of 16 bytes at 4 and 20, the interface, a cookie.
	socketID = 48
	// diagRequest is sizeof(struct inet_diag_req_v2): family, protocol, two
	// more bytes, a set of states at 4, a socketID at 8.
	diagRequest = 8 + socketID
	// diagAnswer is sizeof(struct inet_diag_msg): four bytes, a socketID,
	// and, 16 bytes after it, the inode; 0 for a socket nobody has open.
	diagAnswer = 4 + socketID + 20

	// liveStates are the states in which a program may wait for the other
	// side: ESTABLISHED 1, FIN_WAIT1 4, FIN_WAIT2 5, CLOSE_WAIT 8
	// (include/net/tcp_states.h). One that connects tries again by itself.
	liveStates = 1<<1 | 1<<4 | 1<<5 | 1<<8

	// answerTimeout bounds the wait for an answer of the kernel, which it
	// gives at once unless it was lost, in nanoseconds.
	answerTimeout = 5e9
)

// diag asks the kernel about the TCP sockets of one network namespace.
type diag struct {
	fd  int
	seq uint32
}

// openDiag opens one for the namespace that the thread is in.
func openDiag() (*diag, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	tv := unix.NsecToTimeval(answerTimeout)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("setsockopt", err)
	}
	return &diag{fd: fd}, nil
}

func (d *diag) close() { _ = unix.Close(d.fd) }

// remote is a live TCP socket whose other end is not on the loopback.
type remote struct {
	tcpSocket
	diag *diag
}

// remotes lists them.
func (d *diag) remotes() ([]*remote, error) {
	var all []*remote
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		list, err := d.list(family)
		if err != nil {
			return all, explain(err)
		}
		for _, s := range list {
			if !s.remote.IsLoopback() && !s.remote.IsUnspecified() {
				all = append(all, &remote{s, d})
			}
		}
	}
	return all, nil
}

// destroy destroys the sockets whose other end is outside, and counts those
// that somebody had open.
func destroy(all []*remote, inside func(netip.Addr) bool) (n int, err error) {
	for _, s := range all {
		if inside(s.remote) {
			continue
		}
		gone, derr := s.diag.end(s.tcpSocket)
		if derr != nil {
			err = errors.Join(err, explain(derr))
			continue
		}
		if gone && s.open {
			n++
		}
	}
	return n, err
}

// explain gives kind UNSUPPORTED to what a kernel without the means answers.
func explain(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return errdefs.New(errdefs.Unsupported, "the kernel has no tcp_diag that destroys sockets (INET_DIAG_DESTROY): %w", err)
	}
	return err
}

type tcpSocket struct {
	family byte
	id     [socketID]byte
	remote netip.Addr
	open   bool
}

// list lists the live TCP sockets of a family; one that this kernel does not
// have has none.
func (d *diag) list(family byte) ([]tcpSocket, error) {
	req := tcpRequest(family)
	binary.NativeEndian.PutUint32(req[4:], liveStates)
	var out []tcpSocket
	err := d.ask(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP, req, func(b []byte) {
		if len(b) < diagAnswer {
			return
		}
		s := tcpSocket{family: b[0], id: [socketID]byte(b[4:]), open: binary.NativeEndian.Uint32(b[4+socketID+16:]) != 0}
		size := 4
		if family == unix.AF_INET6 {
			size = 16
		}
		addr, _ := netip.AddrFromSlice(s.id[20 : 20+size]) // the length is right
		s.remote = addr.Unmap()
		out = append(out, s)
	})
	if family == unix.AF_INET6 && errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return out, err
}

// end destroys a socket; one that has ended meanwhile is none.
func (d *diag) end(s tcpSocket) (bool, error) {
	req := tcpRequest(s.family)
	copy(req[8:], s.id[:])
	err := d.ask(unix.SOCK_DESTROY, unix.NLM_F_ACK, req, nil)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

func tcpRequest(family byte) []byte {
	req := make([]byte, diagRequest)
	req[0], req[1] = family, unix.IPPROTO_TCP
	return req
}

// ask sends one request and calls visit with the answers' contents, up to the
// last one.
func (d *diag) ask(kind, flags uint16, req []byte, visit func([]byte)) error {
	d.seq++
	m := make([]byte, unix.SizeofNlMsghdr, unix.SizeofNlMsghdr+len(req))
	binary.NativeEndian.PutUint32(m, uint32(cap(m)))
	binary.NativeEndian.PutUint16(m[4:], kind)
	binary.NativeEndian.PutUint16(m[6:], unix.NLM_F_REQUEST|flags)
	binary.NativeEndian.PutUint32(m[8:], d.seq)
	if err := unix.Sendto(d.fd, append(m, req...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("ask for TCP sockets: %w", err)
	}
	buf := make([]byte, 16<<10)
	for {
		n, _, err := unix.Recvfrom(d.fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("ask for TCP sockets: %w", err)
		}
		list, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return fmt.Errorf("ask for TCP sockets: %w", err)
		}
		for _, a := range list {
			switch {
			case a.Header.Seq != d.seq: // of a request that was given up
			case a.Header.Type == unix.NLMSG_ERROR || a.Header.Type == unix.NLMSG_DONE:
				return answerError(a)
			default:
				visit(a.Data)
			}
		}
	}
}

// answerError is how a request ended: a negative errno, 0 for well.
func answerError(a syscall.NetlinkMessage) error {
	if len(a.Data) < 4 {
		return nil
	}
	if errno := -int32(binary.NativeEndian.Uint32(a.Data)); errno != 0 {
		return fmt.Errorf("ask for TCP sockets: %w", syscall.Errno(errno))
	}
	return nil
}
