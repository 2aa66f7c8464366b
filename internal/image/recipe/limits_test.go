package recipe

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestCommandLimits(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	limits := &Limits{Memory: 64 << 20, File: 1 << 20, CPU: 2 * time.Second}
	var out strings.Builder
	err := Command{Args: []string{"sh", "-c", "ulimit -n; ulimit -v; ulimit -f; ulimit -t"}, Stdout: &out, Limits: limits}.Run(t.Context())
	if err != nil || out.String() != "1024\n65536\n2048\n2\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	err = Command{Args: []string{"dd", "if=/dev/zero", "of=" + file, "bs=64k"}, Limits: limits}.Run(t.Context())
	if info, statErr := os.Stat(file); err == nil || statErr != nil || info.Size() != limits.File {
		t.Errorf("a file without end: %v, %v", err, statErr)
	}
}

const startsLimited = "HOLDPOINT_TEST_STARTS_LIMITED"

// TestLimitedCommandEndsWithUs kills a process in the middle of a command.
func TestLimitedCommandEndsWithUs(t *testing.T) {
	if os.Getenv(startsLimited) != "" {
		_ = Command{
			Args: []string{"sh", "-c", "echo $$; exec sleep 1000"}, Stdout: os.Stdout,
			Limits: &Limits{Memory: 1 << 30, CPU: time.Minute},
		}.Run(t.Context())
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	starter := exec.CommandContext(t.Context(), exe, "-test.run=^TestLimitedCommandEndsWithUs$")
	starter.Env = append(os.Environ(), startsLimited+"=1")
	out, err := starter.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := starter.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = starter.Wait() }() // it is killed
	line, err := bufio.NewReader(out).ReadString('\n')
	var pid int
	if _, scan := fmt.Sscan(line, &pid); err != nil || scan != nil {
		_ = starter.Process.Kill()
		t.Fatalf("the starter said %q: %v", line, err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := starter.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	ended := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(ended, int((10 * time.Second).Milliseconds())); n != 1 {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		t.Errorf("process %d outlives its starter: %v", pid, err)
	}
}
