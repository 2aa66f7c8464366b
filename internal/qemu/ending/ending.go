//go:build linux

// Package ending decides how a run ended, by what its process left. It looks
// for no process.
package ending

import (
	"bytes"
	"encoding/json"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/logs"
	"github.com/holdpoint/holdpoint/internal/qmp"
)

// Evidence is all that is left of a process.
type Evidence struct {
	// Status is nil when another process was the parent.
	Status *unix.WaitStatus
	// Killed: Kill was called, here or before.
	Killed bool
	// OwnAccord: QEMU ran its exit handlers, after closing all disks.
	OwnAccord bool
	// Reason is the SHUTDOWN event's; empty when there was none.
	Reason string
	// Printed is the last line of it.
	Printed string
}

// Classify decides how a run ended. A guest has ended it only if it said so and
// QEMU then closed its disks and exited by itself, or fell over its own feet.
func Classify(e Evidence) machine.Exit {
	clean := e.OwnAccord && (e.Status == nil || e.Status.Exited() && e.Status.ExitStatus() == 0)
	if clean {
		if reason := e.asked(); reason != "" {
			return machine.Exit{Reason: reason}
		}
		switch e.Reason {
		case "host-signal", "host-qmp-quit", "host-ui":
			return machine.Exit{Reason: machine.Killed, Message: e.Printed}
		}
	}
	if e.Killed {
		return machine.Exit{Reason: machine.Killed}
	}
	if reason := e.asked(); reason != "" && e.stumbled() {
		return machine.Exit{Reason: reason, Message: fmt.Sprintf("QEMU then crashed on its way out (%s)", e.Status.Signal())}
	}
	how := "the process ended without a word"
	switch {
	case e.Status != nil && e.Status.Signaled():
		how = fmt.Sprintf("the process was ended by signal %d (%s)", e.Status.Signal(), e.Status.Signal())
	case e.Status != nil && e.Status.Exited():
		how = fmt.Sprintf("the process exited with status %d", e.Status.ExitStatus())
	}
	if e.Reason != "" {
		how += " after " + e.Reason
	}
	if e.Printed != "" {
		how += ": " + e.Printed
	}
	return machine.Exit{Reason: machine.Crashed, Message: how}
}

// asked is the end that the guest has asked for, empty for none.
func (e Evidence) asked() machine.ExitReason {
	switch e.Reason {
	case "guest-shutdown":
		return machine.GuestShutdown
	case "guest-reset":
		return machine.GuestReset
	case "guest-panic":
		return machine.GuestPanic
	}
	return ""
}

// stumbled reports a fault in QEMU's own code. After a SHUTDOWN event that is one
// of its clean-up: QEMU 7.2 still begins a command that arrived just before, and
// its stop then walks disks that are closed (seen in 2 % of ends amid windows).
// The guest had ended by then, and what it flushed is in the disk's files.
func (e Evidence) stumbled() bool {
	return e.Status != nil && e.Status.Signaled() && e.Status.Signal() == unix.SIGSEGV
}

// ShutdownReason is that of the last SHUTDOWN event in the event log.
func ShutdownReason(path string) string {
	reason := ""
	for line := range bytes.Lines(logs.Tail(path, 64<<10)) {
		e, ok := qmp.ParseEvent(line)
		if !ok || e.Name != qmp.Shutdown {
			continue
		}
		var data struct{ Reason string }
		if json.Unmarshal(e.Data, &data) == nil {
			reason = data.Reason
		}
	}
	return reason
}
