package script_test

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"
)

// ownMounts tells the test that it runs in a mount namespace of its own.
const ownMounts = "HOLDPOINT_TEST_OWN_MOUNTS"

// TestSmallDisk runs the sessions whose home is on a small file system. Each is
// a tmpfs, mounted where nobody else sees it, which goes with the last process
// that does.
func TestSmallDisk(t *testing.T) {
	if os.Getenv(ownMounts) != "" {
		testscript.Run(t, params("testdata/small", setupSmall))
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a small file system")
	}
	cmd := exec.CommandContext(t.Context(), thisProgram(), "-test.run=^TestSmallDisk$", "-test.v", "-test.timeout=3m")
	cmd.Env = append(os.Environ(), ownMounts+"=1")
	// Go makes all mounts private in the new namespace.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
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
