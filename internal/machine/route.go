package machine

import (
	"net"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// The protocols of routes.
const (
	HTTP = "http"
	TCP  = "tcp"
)

// loopback is the address on the host that TCP routes are named after.
const loopback = "127.0.0.1"

// TCPHost is what stands for the host name in a TCP route: its address on the
// host, which no other route can have.
func TCPHost(listen int) string { return net.JoinHostPort(loopback, strconv.Itoa(listen)) }

// ListenPort is the port of the host's loopback that a TCP route has; 0 of a
// route with a host name.
func ListenPort(host string) int {
	address, port, err := net.SplitHostPort(host)
	if err != nil || address != loopback {
		return 0
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || TCPHost(int(n)) != host {
		return 0
	}
	return int(n)
}

// RouteProtocol is HTTP or TCP.
func RouteProtocol(host string) string {
	if ListenPort(host) != 0 {
		return TCP
	}
	return HTTP
}

// CheckRoute makes the name of a route canonical: a host name, or the address
// or URL of a TCP route. Anything else is INVALID.
func CheckRoute(host string) (string, error) {
	address := strings.TrimPrefix(host, "tcp://")
	if ListenPort(address) != 0 {
		return address, nil
	}
	if strings.Contains(host, ":") {
		return "", errdefs.New(errdefs.Invalid, "route %q: name it by its host name, or a TCP route by its address, for example %s", host, TCPHost(5432))
	}
	return CheckHost(host)
}
