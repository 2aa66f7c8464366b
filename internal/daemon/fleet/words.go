//go:build linux

package fleet

import (
	monitorv1 "github.com/holdpoint/holdpoint/api/monitor/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// refusal is why a guest will never be ready. What went wrong in it by itself is
// a state of the machine to us, and no failure of ours.
func refusal(status *monitorv1.StatusResponse) error {
	kind := errdefs.Kind(status.GetRefusedKind())
	if kind == "" || kind == errdefs.Internal {
		kind = errdefs.WrongState
	}
	return errdefs.New(kind, "the guest refuses what it is told: %s", status.GetRefused())
}

// words say in a sentence how a run ended.
func words(exit *monitorv1.Exit) string {
	did := map[machine.ExitReason]string{
		machine.GuestShutdown: "the guest shut down", machine.GuestReset: "the guest reset itself", machine.GuestPanic: "the guest's kernel gave up",
		machine.Killed: "its process was killed", machine.Crashed: "its process crashed",
	}[machine.ExitReason(exit.GetReason())]
	switch {
	case did == "":
		return Describe(exit)
	case exit.GetMessage() != "":
		return did + ": " + exit.GetMessage()
	}
	return did
}

// Describe says how a run ended, for people.
func Describe(exit *monitorv1.Exit) string {
	if exit == nil {
		return "reason unknown"
	}
	if exit.GetMessage() != "" {
		return exit.GetReason() + ": " + exit.GetMessage()
	}
	return exit.GetReason()
}
