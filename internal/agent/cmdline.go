package agent

import (
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
)

// Params is what the host tells the agent on the kernel command line.
type Params struct {
	// Magic is from holdpoint.magic=<32 hexadecimal digits>, and must be there.
	Magic link.Magic
	// Root is the block device of the root file system, from
	// holdpoint.root=/dev/…; /dev/vda if it is not there.
	Root string
	// System is holdpoint.init=system: process 1 is to be the init of the root.
	System bool
}

// ParseCmdline reads a kernel command line. Words that are not ours are
// skipped; of ours the last one counts.
func ParseCmdline(s string) (Params, error) {
	p := Params{Root: "/dev/vda"}
	found := false
	for word := range strings.FieldsSeq(s) {
		name, value, _ := strings.Cut(word, "=")
		switch name {
		case "holdpoint.magic":
			m, err := link.ParseMagic(value)
			if err != nil {
				return Params{}, err
			}
			p.Magic, found = m, true
		case "holdpoint.root":
			if !strings.HasPrefix(value, "/dev/") {
				return Params{}, errdefs.New(errdefs.Invalid, "kernel command line: %s: use a device below /dev", word)
			}
			p.Root = value
		case "holdpoint.init":
			if value != "agent" && value != "system" {
				return Params{}, errdefs.New(errdefs.Invalid, "kernel command line: %s: use agent or system", word)
			}
			p.System = value == "system"
		}
	}
	if !found {
		return Params{}, errdefs.New(errdefs.Invalid, "kernel command line: holdpoint.magic is missing")
	}
	return p, nil
}
