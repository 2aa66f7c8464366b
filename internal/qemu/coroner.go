//go:build linux

package qemu

import (
	"os"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/ending"
	"github.com/holdpoint/holdpoint/internal/qemu/reach"
)

var _ machine.Coroner = (*QEMU)(nil)

// ExitOf is that of machine.Coroner. Nobody has the process's exit status.
func (q *QEMU) ExitOf(cfg machine.RunConfig) machine.Exit {
	reach.Open(cfg.Dir).Clear()
	_, err := os.Stat(filepath.Join(cfg.Dir, killFile))
	return ending.Classify(ending.Evidence{
		Killed:    err == nil,
		OwnAccord: isGone(filepath.Join(cfg.Dir, pidFile)),
		Reason:    ending.ShutdownReason(filepath.Join(cfg.Dir, eventsOut)),
		Printed:   printed(cfg),
	})
}
