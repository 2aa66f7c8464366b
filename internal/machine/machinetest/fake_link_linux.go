package machinetest

import (
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

func socketpair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	file := os.NewFile(uintptr(fds[0]), "port")
	defer file.Close()
	ours, err = net.FileConn(file)
	return ours, os.NewFile(uintptr(fds[1]), "port"), err
}

// acceptLinks gives the port to one host connection after the other.
func (m *fakeMachine) acceptLinks() {
	for {
		conn, err := m.link.Accept()
		if err != nil {
			return
		}
		m.hostMu.Lock()
		m.host = conn
		m.hostMu.Unlock()
		m.copy(m.port, conn)
		m.hostMu.Lock()
		m.host = nil
		m.hostMu.Unlock()
		conn.Close()
	}
}

// toHost carries what the guest says to the host connection there is; without
// one it is dropped, as virtio-serial does.
func (m *fakeMachine) toHost() { m.copy(hostWriter{m}, m.port) }

type hostWriter struct{ m *fakeMachine }

func (w hostWriter) Write(p []byte) (int, error) {
	w.m.hostMu.Lock()
	host := w.m.host
	w.m.hostMu.Unlock()
	if host != nil {
		_, _ = host.Write(p) // a broken one is seen by its reader
	}
	return len(p), nil
}

// copy copies until either side ends, slowly if it was asked for.
func (m *fakeMachine) copy(to io.Writer, from io.Reader) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if text, slow := m.fault("slow-link"); slow {
			if delay, err := time.ParseDuration(text + "ms"); err == nil {
				time.Sleep(delay)
			}
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
