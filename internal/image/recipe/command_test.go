package recipe

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestCommand(t *testing.T) {
	var out strings.Builder
	err := Command{Args: []string{"sh", "-c", `cat; echo "$X $(ulimit -n)"`}, Env: []string{"X=y"}, Stdin: strings.NewReader("in "), Stdout: &out}.Run(t.Context())
	if err != nil || out.String() != "in y 1024\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	err = Command{Args: []string{"sh", "-c", "exit 3"}}.Run(t.Context())
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("exit 3: %v", err)
	}
}

// TestCommandCanceledEndsItsChildren: what the tool started as a daemon
// is ended with it, and the tool may clean up first.
func TestCommandCanceledEndsItsChildren(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w := io.Pipe()
	pid := make(chan int, 1)
	go func() {
		line := make([]byte, 32)
		n, _ := r.Read(line)
		p, _ := strconv.Atoi(strings.TrimSpace(string(line[:n])))
		pid <- p
		cancel()
		_, _ = io.Copy(io.Discard, r)
	}()
	// The child leaves the group, as a daemon does.
	script := `trap 'touch "$1/cleaned"; exit 1' TERM; setsid sleep 1000 & echo $!; wait`
	err := Command{Args: []string{"sh", "-c", script, "sh", dir}, Stdout: w}.Run(ctx)
	w.Close()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that of the cancellation", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "cleaned")); err != nil {
		t.Errorf("the tool could not clean up: %v", err)
	}
	child := <-pid
	deadline := time.Now().Add(10 * time.Second)
	for unix.Kill(child, 0) == nil && !zombie(child) {
		if time.Now().After(deadline) {
			t.Fatal("a child of the tool is still running")
		}
		time.Sleep(5 * time.Millisecond) // not our child: there is nothing to wait on
	}
}

func zombie(pid int) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestLog(t *testing.T) {
	dir := t.TempDir()
	var steps []string
	var log *Log
	for range keptLogs + 3 {
		if log != nil {
			log.Close()
		}
		var err error
		if log, err = NewLog(dir, func(s string) { steps = append(steps, s) }); err != nil {
			t.Fatal(err)
		}
	}
	defer log.Close()
	if found, err := os.ReadDir(dir); err != nil || len(found) != keptLogs {
		t.Errorf("%d logs are kept, want %d (%v)", len(found), keptLogs, err)
	}
	if log.Reason() != "" || log.SawFull() {
		t.Error("an empty log has a reason")
	}
	for _, chunk := range []string{"I: running apt-get up", "date...\nI: using /x as tempdir\nGet:1 x\nE: Unable to locate package nope\nE: setup failed\nI: done\n"} {
		if n, err := log.Write([]byte(chunk)); err != nil || n != len(chunk) {
			t.Fatal(n, err)
		}
	}
	if strings.Join(steps, "|") != "running apt-get update" {
		t.Errorf("steps %q", steps)
	}
	d := &Debian{}
	err := d.explain(errors.New("exit status 1"), log)
	if !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), "Unable to locate package nope; all output is in "+log.Path()) {
		t.Errorf("explain: %v", err)
	}
	_, _ = io.WriteString(log, "holdpoint: the script ended with exit code 7\n")
	if err := d.explain(errors.New("x"), log); !strings.Contains(err.Error(), "the script ended with exit code 7") {
		t.Errorf("explain: %v", err)
	}
	_, _ = io.WriteString(log, "tar: x: Cannot write: No space left on device\n")
	if err := d.explain(errors.New("x"), log); !errdefs.Is(err, errdefs.NoSpace) {
		t.Errorf("explain: %v, want NO_SPACE", err)
	}
	if text, err := os.ReadFile(log.Path()); err != nil || !strings.HasPrefix(string(text), "I: running apt-get update...\n") {
		t.Errorf("the file has %.40q, %v", text, err)
	}
}
