//go:build linux

package host

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const startsBound = "HOLDPOINT_TEST_STARTS_BOUND"

// TestBind kills a process in the middle of what it lets another one do.
func TestBind(t *testing.T) {
	if os.Getenv(startsBound) != "" {
		cmd := exec.Command("sleep", "1000")
		defer Bind(cmd)()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		fmt.Println(cmd.Process.Pid)
		_ = cmd.Wait()
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	starter := exec.CommandContext(t.Context(), exe, "-test.run=^TestBind$")
	starter.Env = append(os.Environ(), startsBound+"=1")
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
