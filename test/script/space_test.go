package script_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/test/session"
)

// TestSmallDisk runs the sessions whose home is on a small file system, a tmpfs
// for each.
func TestSmallDisk(t *testing.T) {
	if session.InOwnMounts(t, 3*time.Minute) {
		testscript.Run(t, params("testdata/small", setupSmall))
	}
}

// setupSmall gives a script its session with a home of 96 MiB.
func setupSmall(env *testscript.Env) error {
	s, err := scriptSession(env)
	if err != nil {
		return err
	}
	if err := unix.Mount("small", s.Home, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=96m,mode=0700"); err != nil {
		return fmt.Errorf("mount a small home: %w", err)
	}
	env.Defer(func() {
		if err := unix.Unmount(s.Home, unix.MNT_DETACH); err != nil {
			env.T().Log(err)
		}
	})
	return nil
}
