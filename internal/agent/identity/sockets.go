//go:build linux

package identity

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/netlink"
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
)

// diag asks the kernel about the TCP sockets of one network namespace.
type diag struct{ *netlink.Conn }

// openDiag opens one for the namespace that the thread is in.
func openDiag() (*diag, error) {
	conn, err := netlink.Open(unix.NETLINK_SOCK_DIAG, netlink.Timeout)
	if err != nil {
		return nil, err
	}
	return &diag{conn}, nil
}

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
	if err := d.Ask(kind, flags, req, visit); err != nil {
		return fmt.Errorf("ask for TCP sockets: %w", err)
	}
	return nil
}
