package session

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// ownMounts tells a test that it runs in a mount namespace of its own.
const ownMounts = "HOLDPOINT_TEST_OWN_MOUNTS"

// InOwnMounts runs the calling test again, in a mount namespace of its own and in
// so much time, and reports whether it is that one: only then is the test to do
// anything. Nobody else sees what it mounts, which goes with the last process
// that does.
func InOwnMounts(t *testing.T, limit time.Duration) bool {
	t.Helper()
	return again(t, limit, syscall.CLONE_NEWNS)
}

// InOwnNetwork is InOwnMounts with a network namespace besides, in which there is
// no device but a loopback that is down.
func InOwnNetwork(t *testing.T, limit time.Duration) bool {
	t.Helper()
	return again(t, limit, syscall.CLONE_NEWNS|syscall.CLONE_NEWNET)
}

func again(t *testing.T, limit time.Duration, namespaces uintptr) bool {
	t.Helper()
	if os.Getenv(ownMounts) != "" {
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can have namespaces of its own here")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout="+limit.String())
	cmd.Env = append(os.Environ(), ownMounts+"=1")
	// Go makes all mounts private in the new namespace.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: namespaces}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
	return false
}
