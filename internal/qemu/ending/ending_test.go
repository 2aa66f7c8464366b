//go:build linux

package ending

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/machine"
)

func TestClassify(t *testing.T) {
	exited := func(code int) *unix.WaitStatus { s := unix.WaitStatus(code << 8); return &s }
	signaled := func(sig int) *unix.WaitStatus { s := unix.WaitStatus(sig); return &s }
	for name, c := range map[string]struct {
		e    Evidence
		want machine.ExitReason
	}{
		"shutdown, our child":           {Evidence{Status: exited(0), OwnAccord: true, Reason: "guest-shutdown"}, machine.GuestShutdown},
		"shutdown, adopted":             {Evidence{OwnAccord: true, Reason: "guest-shutdown"}, machine.GuestShutdown},
		"reset":                         {Evidence{OwnAccord: true, Reason: "guest-reset"}, machine.GuestReset},
		"panic":                         {Evidence{Status: exited(0), OwnAccord: true, Reason: "guest-panic"}, machine.GuestPanic},
		"kill":                          {Evidence{Status: signaled(9), Killed: true}, machine.Killed},
		"kill, adopted":                 {Evidence{Killed: true}, machine.Killed},
		"kill too late":                 {Evidence{Status: exited(0), OwnAccord: true, Killed: true, Reason: "guest-shutdown"}, machine.GuestShutdown},
		"kill amid shutdown":            {Evidence{Status: signaled(9), Killed: true, Reason: "guest-shutdown"}, machine.Killed},
		"fault amid shutdown":           {Evidence{Status: signaled(11), Reason: "guest-shutdown"}, machine.GuestShutdown},
		"fault amid reset":              {Evidence{Status: signaled(11), Reason: "guest-reset"}, machine.GuestReset},
		"fault amid quit":               {Evidence{Status: signaled(11), Reason: "host-qmp-quit"}, machine.Crashed},
		"fault":                         {Evidence{Status: signaled(11)}, machine.Crashed},
		"killed by another":             {Evidence{Status: signaled(9), Reason: "guest-shutdown"}, machine.Crashed},
		"crash amid shutdown, adopted":  {Evidence{Reason: "guest-shutdown"}, machine.Crashed},
		"failed exit after shutdown":    {Evidence{Status: exited(1), OwnAccord: true, Reason: "guest-shutdown"}, machine.Crashed},
		"SIGTERM":                       {Evidence{Status: exited(0), OwnAccord: true, Reason: "host-signal"}, machine.Killed},
		"abort":                         {Evidence{Status: signaled(6)}, machine.Crashed},
		"error exit":                    {Evidence{Status: exited(1), OwnAccord: true}, machine.Crashed},
		"nothing known":                 {Evidence{}, machine.Crashed},
		"a reason of a later QEMU":      {Evidence{OwnAccord: true, Reason: "host-new"}, machine.Crashed},
		"exit without an event, status": {Evidence{Status: exited(0), OwnAccord: true}, machine.Crashed},
	} {
		if got := Classify(c.e); got.Reason != c.want {
			t.Errorf("%s: %+v, want %s", name, got, c.want)
		}
	}
}

// The front of a log that has grown too long reads as zeros.
func TestShutdownReason(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	text := strings.Repeat("\x00", 1<<20) + "\n" +
		`{"event": "SHUTDOWN", "data": {"guest": false, "reason": "host-signal"}}` + "\r\n" +
		`{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}}` + "\r\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if reason := ShutdownReason(path); reason != "guest-reset" {
		t.Errorf("reason %q", reason)
	}
	if reason := ShutdownReason(path + "x"); reason != "" {
		t.Errorf("reason %q without a file", reason)
	}
}
