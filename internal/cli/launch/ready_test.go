//go:build unix

package launch_test

import (
	"errors"
	"os"
	"strconv"
	"syscall"
	"testing"

	"github.com/holdpoint/holdpoint/internal/cli/launch"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestAnnouncements(t *testing.T) {
	for _, test := range []struct {
		name    string
		say     func(*launch.Announcer)
		kind    errdefs.Kind
		message string
	}{
		{"ready", func(a *launch.Announcer) { a.Ready() }, "", ""},
		{"ready, then failed", func(a *launch.Announcer) { a.Ready(); a.Failed(errors.New("late")) }, "", ""},
		{
			"failed", func(a *launch.Announcer) { a.Failed(errdefs.New(errdefs.Denied, "home: not\nyours")) },
			errdefs.Denied, "start the daemon: home: not yours",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			// The announcer owns its descriptor.
			fd, err := syscall.Dup(int(w.Fd()))
			w.Close()
			if err != nil {
				t.Fatal(err)
			}
			t.Setenv("HOLDPOINT_READY_FD", strconv.Itoa(fd))
			a := launch.NewAnnouncer()
			if os.Getenv("HOLDPOINT_READY_FD") != "" {
				t.Error("the variable is left for children")
			}
			test.say(a)
			err = launch.ReadAnnouncement(r, "log")
			if errdefs.KindOf(err) != test.kind || err != nil && err.Error() != test.message {
				t.Errorf("%v of kind %s", err, errdefs.KindOf(err))
			}
		})
	}
	t.Run("nobody waits", func(t *testing.T) {
		t.Setenv("HOLDPOINT_READY_FD", "")
		launch.NewAnnouncer().Ready()
	})
}
