package vm_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/dirty"
)

// newerVariable names the folder of an image like that of imageVariable, but
// with a kernel that has PAGEMAP_SCAN.
const newerVariable = "HOLDPOINT_TEST_IMAGE_NEWER"

// TestOlderKernel runs the tests of package dirty in a guest with the kernel of
// Debian 12, which has soft-dirty bits and no PAGEMAP_SCAN: the other way round
// than this host's, maybe.
func TestOlderKernel(t *testing.T) {
	otherKernel(t)
	prepared(t)
	newAlive(t).runDirtyTests(t, map[dirty.Strategy]bool{dirty.SoftDirty: true, dirty.Untracked: true})
}

// TestNewerKernel runs them in a guest whose kernel has both, and takes such a
// guest through a full checkpoint. It wants a QEMU that emulates that kernel
// well, which 7.2 does not: under it Linux 6.12 crashes now and then, even while
// it boots.
func TestNewerKernel(t *testing.T) {
	newer := otherKernel(t)
	prepared(t)
	t.Setenv(imageVariable, newer)
	a := newAlive(t)
	a.runDirtyTests(t, map[dirty.Strategy]bool{dirty.Userfaultfd: true, dirty.SoftDirty: true, dirty.Untracked: true})
	t.Run("guest", a.testGuest)
}

// otherKernel is the image with the newer kernel; the test is skipped without it.
func otherKernel(t *testing.T) string {
	t.Helper()
	newer := os.Getenv(newerVariable)
	if newer == "" {
		t.Skipf("%s is not set; run make test-versions", newerVariable)
	}
	return newer
}

// hasScan reports whether a kernel release, as uname has it, has PAGEMAP_SCAN.
func hasScan(t *testing.T, release string) bool {
	t.Helper()
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		t.Fatalf("kernel release %q: %v", release, err)
	}
	return major > 6 || major == 6 && minor >= 7
}

// runDirtyTests runs the tests of package dirty in a guest, whose kernel is to
// have the strategies that are true and to lack all others.
func (a alive) runDirtyTests(t *testing.T, has map[dirty.Strategy]bool) {
	tests := filepath.Join(t.TempDir(), "dirty.test")
	build := exec.Command("go", "test", "-c", "-o", tests, "../../internal/dirty")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the tests: %v: %s", err, out)
	}
	a.Must(t, "run", "lab", "--image", "debian", "--memory", "512M", "--cpus", "2")
	release := strings.TrimSpace(a.Must(t, "exec", "lab", "--", "uname", "-r"))
	if got := hasScan(t, release); got != has[dirty.Userfaultfd] {
		t.Fatalf("Linux %s has PAGEMAP_SCAN: %v, want %v", release, got, has[dirty.Userfaultfd])
	}
	a.Must(t, "cp", tests, "lab:/root/dirty.test")
	// The one that starts guests itself wants Go; those with QEMU skip themselves.
	r, err := a.Run("exec", "lab", "--", "/root/dirty.test", "-test.v", "-test.skip=^TestOtherKernel$", "-test.timeout=15m")
	if err != nil || r.Code != 0 || !strings.HasSuffix(r.Stdout, "\nPASS\n") {
		console, _ := a.Run("logs", "lab")
		t.Fatalf("Linux %s: exit code %d, %v:\n%s%s\nconsole:\n%s", release, r.Code, err, r.Stdout, r.Stderr, console.Stdout)
	}
	for _, strategy := range []dirty.Strategy{dirty.Userfaultfd, dirty.SoftDirty, dirty.Untracked} {
		result := "SKIP"
		if has[strategy] {
			result = "PASS"
		}
		for _, test := range []string{"TestWritesAreReportedAndReadsAreNot", "TestEpochsAddUpToTheMemory"} {
			if line := fmt.Sprintf("--- %s: %s/%s (", result, test, strategy); !strings.Contains(r.Stdout, line) {
				t.Errorf("Linux %s: no %q in\n%s", release, line, r.Stdout)
			}
		}
	}
	t.Logf("Linux %s", release)
	for line := range strings.Lines(r.Stdout) {
		// What the kernel was found to have, and what epochs had in them.
		if strings.Contains(line, "tracker_test.go") || strings.Contains(line, "epochs_test.go") {
			t.Log(strings.TrimSpace(line))
		}
	}
	a.Must(t, "rm", "lab", "--force")
}

// testGuest takes a guest with that kernel through a full checkpoint, too.
func (a alive) testGuest(t *testing.T) {
	a.start(t, "web")
	a.mark(t, "web", "one")
	at := a.awaitProgress(t, "web", a.check(t, "web", report{}))
	a.checkpoint(t, "web", "one")
	a.mark(t, "web", "two")
	a.awaitProgress(t, "web", at)
	a.Must(t, "restore", "web", "one", "--full", "--yes")
	a.checkClock(t, "web")
	a.isAt(t, "web", "one", at)
	a.Must(t, "fork", "one", "--name", "try")
	a.checkClock(t, "try-1")
	a.isAt(t, "try-1", "one", at)
	a.clean(t)
}
