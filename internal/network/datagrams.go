package network

import (
	"errors"
	"net"
	"syscall"
)

// datagrams calls deliver for each datagram until the connection ends. A flow
// that waits holds no buffer, since there may be thousands; d is deliver's until
// it returns.
func (s *session) datagrams(conn net.Conn, deliver func(d []byte)) error {
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return errors.New("read datagrams: not a socket")
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var readErr error
		err := raw.Read(func(fd uintptr) bool {
			buf := s.buffer()
			defer s.buffers.Put(buf)
			var n int
			n, _, readErr = syscall.Recvfrom(int(fd), buf[:], 0)
			if readErr == nil {
				deliver(buf[:n])
			}
			return !errors.Is(readErr, syscall.EAGAIN)
		})
		if err = errors.Join(err, readErr); err != nil {
			return err
		}
	}
}

// datagram is room for one.
type datagram [maxDatagram]byte

func (s *session) buffer() *datagram {
	if buf, ok := s.buffers.Get().(*datagram); ok {
		return buf
	}
	return new(datagram)
}
