// The holdpoint command: the command line, the daemon, and the monitors. It
// holds no code of its own but the wiring; where there is no Linux it is a
// client only.
package main

import (
	"os"

	"github.com/holdpoint/holdpoint/internal/cli"
)

// version is set by the linker: -ldflags "-X main.version=…".
var version string

func main() {
	cfg := cli.Config{Version: version}
	wire(&cfg)
	os.Exit(cli.Main(cfg))
}
