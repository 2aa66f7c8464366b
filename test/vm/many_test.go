package vm_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// manyVariable makes tests that repeat themselves do so as often as it says.
const manyVariable = "HOLDPOINT_TEST_MANY"

func rounds(t *testing.T, usual int) int {
	t.Helper()
	text := os.Getenv(manyVariable)
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// mostOpen is how many layers of its disk a machine may have open, however many
// checkpoints were taken of it.
const mostOpen = 16

// TestManyCheckpoints takes many of one machine. Each window leaves the guest's
// clock behind, and each adds a layer to its disk, which are merged while it runs.
func TestManyCheckpoints(t *testing.T) {
	a := newAlive(t)
	a.start(t, "web")
	n := rounds(t, 24)
	var lost float64
	before := a.check(t, "web", report{})
	for i := range n {
		a.write(t, "web", i)
		lost += a.checkpoint(t, "web", fmt.Sprintf("c%d", i)).DowntimeMS
	}
	a.checkClock(t, "web")
	a.check(t, "web", before)
	t.Logf("the windows took %.0f ms", lost)
	if lost < float64(clockError.Milliseconds()) {
		t.Errorf("only %.0f ms in all: too little to be seen", lost)
	}
	await(t, func() error {
		if open := a.openLayers(t, "web"); open > mostOpen {
			return fmt.Errorf("%d layers are open after %d checkpoints", open, n)
		}
		return nil
	})
	a.has(t, "web", n)
	a.awaitProgress(t, "web", before)
	a.clean(t)

	a.Must(t, "exec", "web", "--", "sync")
	a.Must(t, "stop", "web", "--force")
	a.Must(t, "start", "web")
	a.has(t, "web", n)
	middle := n/2 + 1
	a.Must(t, "restore", "web", fmt.Sprintf("c%d", middle), "--full", "--yes", "--no-safety")
	a.has(t, "web", middle+1)
	a.check(t, "web", before)
	a.Must(t, "fork", fmt.Sprintf("c%d", n-1), "--name", "try")
	a.has(t, "try-1", n)
	a.clean(t)
}

// write leaves file i on the disk, with some bytes that are nowhere else, and
// overwrites those of the file before the last.
func (a alive) write(t *testing.T, machine string, i int) {
	t.Helper()
	a.Must(t, "exec", machine, "--", "sh", "-ec", fmt.Sprintf(`mkdir -p /many; cd /many
		head -c 300000 /dev/urandom >f%[1]d; sha256sum f%[1]d >s%[1]d
		if test -e f%[2]d; then head -c 100000 /dev/urandom | dd of=f%[2]d conv=notrunc status=none; sha256sum f%[2]d >s%[2]d; fi; sync`, i, i-2))
}

// has fails the test unless the disk has the first n files, whole, and no more.
func (a alive) has(t *testing.T, machine string, n int) {
	t.Helper()
	got := a.Must(t, "exec", machine, "--", "sh", "-ec", "cd /many; echo 3 >/proc/sys/vm/drop_caches; cat s* | sha256sum -c --quiet; ls f* | wc -l")
	if strings.TrimSpace(got) != strconv.Itoa(n) {
		t.Fatalf("%s has %s files, not %d", machine, strings.TrimSpace(got), n)
	}
}

// openLayers counts the layers that the machine's process has open.
func (a alive) openLayers(t *testing.T, machine string) (n int) {
	t.Helper()
	var v struct {
		Machine struct {
			QEMUPID int `json:"qemu_pid"`
		}
	}
	a.JSON(t, &v, "inspect", machine)
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", v.Machine.QEMUPID))
	if err != nil || len(files) == 0 {
		t.Fatalf("process %d has no files: %v", v.Machine.QEMUPID, err)
	}
	for _, f := range files {
		if target, err := os.Readlink(f); err == nil && strings.HasSuffix(target, ".qcow2") {
			n++
		}
	}
	return n
}
