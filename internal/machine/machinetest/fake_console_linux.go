package machinetest

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/holdpoint/holdpoint/internal/machine"
)

func consoleSocket(cfg machine.RunConfig) string {
	return filepath.Join(cfg.SocketDir, machine.ConsoleSocket)
}

// serveConsole lets one after the other at the console.
func (m *fakeMachine) serveConsole() {
	for {
		conn, err := m.console.Accept()
		if err != nil {
			return
		}
		m.attendConsole(conn)
	}
}

// attendConsole repeats each line that is typed, and powers off at "poweroff".
func (m *fakeMachine) attendConsole(conn net.Conn) {
	defer conn.Close()
	lines := bufio.NewReader(conn)
	for {
		line, err := lines.ReadString('\r')
		if err != nil {
			return
		}
		said := "fake console has: " + strings.TrimSpace(line)
		fmt.Fprint(conn, said+"\r\n")
		fmt.Fprintln(os.Stderr, said)
		if strings.TrimSpace(line) == "poweroff" {
			m.mu.Lock()
			m.end(machine.GuestShutdown, "")
		}
	}
}
