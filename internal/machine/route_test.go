package machine_test

import (
	"testing"

	"github.com/holdpoint/holdpoint/internal/machine"
)

func TestRouteNames(t *testing.T) {
	for in, want := range map[string]struct {
		name, protocol string
		port           int
	}{
		"App.localhost.":        {"app.localhost", "http", 0},
		"127.0.0.1:5432":        {"127.0.0.1:5432", "tcp", 5432},
		"tcp://127.0.0.1:65535": {"127.0.0.1:65535", "tcp", 65535},
		"127.0.0.1":             {"127.0.0.1", "http", 0},
		"127.0.0.1:0":           {},
		"127.0.0.1:05432":       {},
		"127.0.0.1:65536":       {},
		"10.0.0.1:80":           {},
		"[::1]:80":              {},
		"app.localhost:80":      {},
		"tcp://app.localhost":   {},
		"":                      {},
	} {
		got, err := machine.CheckRoute(in)
		if got != want.name || (err == nil) != (want.name != "") {
			t.Errorf("%q: %q, %v", in, got, err)
			continue
		}
		if err == nil && (machine.ListenPort(got) != want.port || machine.RouteProtocol(got) != want.protocol) {
			t.Errorf("%q: port %d, %s", in, machine.ListenPort(got), machine.RouteProtocol(got))
		}
	}
}
