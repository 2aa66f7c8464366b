//go:build linux

package qemu

import (
	"os"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/machine"
)

var _ machine.Coroner = (*QEMU)(nil)

// ExitOf is that of machine.Coroner. Nobody has the process's exit status.
func (q *QEMU) ExitOf(cfg machine.RunConfig) machine.Exit {
	_, err := os.Stat(filepath.Join(cfg.Dir, killFile))
	return classify(evidence{
		killed:    err == nil,
		ownAccord: isGone(filepath.Join(cfg.Dir, pidFile)),
		reason:    shutdownReason(filepath.Join(cfg.Dir, eventsOut)),
		printed:   printed(cfg),
	})
}
