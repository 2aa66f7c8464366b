package vm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
)

// TestLife is one machine's: many commands at once, tars, its console, another
// name, what it uses, and that it comes back when it has ended by itself.
func TestLife(t *testing.T) {
	a := newAlive(t)
	a.Must(t, "run", "web", "--image", "debian", "--memory", "256M", "--restart", "always")
	for _, part := range []struct {
		name string
		does func(*testing.T, alive)
	}{
		{"exec", manyCommands}, {"cp", tars}, {"console", atConsole}, {"stats", measured}, {"rename", renamed}, {"restart", comesBack},
	} {
		began := time.Now()
		t.Run(part.name, func(t *testing.T) { part.does(t, a) })
		t.Logf("%s: %.1f s", part.name, time.Since(began).Seconds())
	}
}

// manyCommands runs fifty at once, each with its own output and exit code.
func manyCommands(t *testing.T, a alive) {
	const n = 50
	var wg sync.WaitGroup
	// None ends before all have begun, and none uses the CPU to wait for that: each
	// takes a line out of the gate.
	a.Must(t, "exec", "web", "--", "sh", "-c", "mkdir /run/many; mkfifo /run/gate")
	a.Must(t, "exec", "web", "--detach", "--", "sh", "-c", fmt.Sprintf(`exec 3<>/run/gate
		while test $(ls /run/many | wc -l) -lt %[1]d; do sleep 1; done; yes | head -n %[1]d >&3; sleep infinity`, n))
	const script = `: >/run/many/%[1]d; read go </run/gate; echo out %[1]d; echo err %[1]d >&2; exit %[1]d`
	for i := range n {
		wg.Go(func() {
			r, err := a.Run("exec", "web", "--", "sh", "-c", fmt.Sprintf(script, i))
			if err != nil || r.Code != i || r.Stdout != fmt.Sprintf("out %d\n", i) || r.Stderr != fmt.Sprintf("err %d\n", i) {
				t.Errorf("command %d: code %d, %q, %q, %v", i, r.Code, r.Stdout, r.Stderr, err)
			}
		})
	}
	wg.Wait()
}

// tars go in and come out as they are.
func tars(t *testing.T, a alive) {
	dir := t.TempDir()
	source := filepath.Join(dir, "in")
	if err := errors.Join(os.Mkdir(source, 0o755), os.WriteFile(filepath.Join(source, "a"), []byte("content"), 0o640), os.Symlink("a", filepath.Join(source, "b"))); err != nil {
		t.Fatal(err)
	}
	in, err := exec.Command("tar", "-C", dir, "-cf", "-", "in").Output()
	if err != nil {
		t.Fatal(err)
	}
	put := a.Command("cp", "-", "web:/srv/tars")
	put.Stdin = bytes.NewReader(in)
	if out, err := put.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := a.Command("cp", "web:/srv/tars/in", "-").Output()
	if err != nil {
		t.Fatal(err)
	}
	list := exec.Command("tar", "-tvf", "-")
	list.Stdin = bytes.NewReader(out)
	text, err := list.CombinedOutput()
	if err != nil || !strings.Contains(string(text), "-rw-r----- ") || !strings.Contains(string(text), "in/b -> a") {
		t.Errorf("%v: %s", err, text)
	}
}

// seat is a terminal with somebody at the console.
type seat struct {
	t   *testing.T
	cmd *exec.Cmd
	tty *os.File

	mu   sync.Mutex
	text strings.Builder
	end  chan struct{}
}

func sit(t *testing.T, a alive, machine string) *seat {
	t.Helper()
	s := &seat{t: t, cmd: a.Command("console", machine), end: make(chan struct{})}
	tty, err := pty.StartWithSize(s.cmd, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		t.Fatal(err)
	}
	s.tty = tty
	go func() {
		defer close(s.end)
		buffer := make([]byte, 4096)
		for {
			n, err := tty.Read(buffer)
			s.mu.Lock()
			s.text.Write(buffer[:n])
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	s.sees("Ctrl-P Ctrl-Q to leave")
	return s
}

// sees waits until the terminal shows text.
func (s *seat) sees(text string) {
	s.t.Helper()
	await(s.t, func() error { return s.shows(text) })
}

// shows is nil if the terminal has shown text since that was so last.
func (s *seat) shows(text string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	shown := s.text.String()
	_, rest, found := strings.Cut(shown, text)
	if !found {
		return fmt.Errorf("the console shows no %q: %q", text, shown)
	}
	s.text.Reset()
	s.text.WriteString(rest)
	return nil
}

func (s *seat) types(text string) {
	s.t.Helper()
	if _, err := io.WriteString(s.tty, text); err != nil {
		s.t.Fatal(err)
	}
}

// begins presses Enter until somebody is there who gives a shell.
func (s *seat) begins() {
	s.t.Helper()
	await(s.t, func() error {
		s.types("\r")
		return s.shows("a root shell on the ")
	})
}

// left waits for the end of the verb, with the exit code.
func (s *seat) left(code int) {
	s.t.Helper()
	<-s.end
	var exit *exec.ExitError
	if err := s.cmd.Wait(); err != nil && !errors.As(err, &exit) || s.cmd.ProcessState.ExitCode() != code {
		s.t.Errorf("console ends with %d, not %d", s.cmd.ProcessState.ExitCode(), code)
	}
	_ = s.tty.Close()
}

// typesOver types while a checkpoint is made: what comes while that holds the
// machine waits, and nothing is lost.
func typesOver(t *testing.T, a alive, s *seat) {
	t.Helper()
	made := make(chan error, 1)
	go func() {
		r, err := a.Run("checkpoint", "create", "web", "--name", "here")
		if err == nil && r.Code != 0 {
			err = errors.New(r.Stderr)
		}
		made <- err
	}()
	s.types("echo ")
	typed := ""
	for i, over := 0, false; !over; i++ {
		key := fmt.Sprintf("%d.", i)
		s.types(key)
		typed += key
		select {
		case err := <-made:
			if over = true; err != nil {
				t.Fatal(err)
			}
		case <-time.After(20 * time.Millisecond): // a quick hand
		}
	}
	s.types("end | tr . _\r")
	s.sees(strings.ReplaceAll(typed, ".", "_") + "end")
}

// atConsole has a shell there, which outlives who began it and a checkpoint, and sits
// through a reboot.
func atConsole(t *testing.T, a alive) {
	s := sit(t, a, "web")
	s.types("\x04") // as by one who thinks that a shell is there
	s.begins()
	s.sees("# ")
	s.types("echo $((20+3)) at $(tty); kept=here\r")
	s.sees("23 at /dev/ttyS0")
	second := a.Command("console", "web")
	tty, err := pty.Start(second)
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(tty) // ends in EIO
	if err := second.Wait(); err == nil || second.ProcessState.ExitCode() != 5 || !strings.Contains(string(text), "one place") {
		t.Errorf("a second one: %v, %q", err, text)
	}
	_ = tty.Close()
	typesOver(t, a, s)
	s.types("\x10\x11")
	s.sees("left the console of web")
	s.left(0)

	s = sit(t, a, "web")
	s.types("echo $kept still\r")
	s.sees("here still")
	s.types("sync; echo b >/proc/sysrq-trigger\r")
	s.sees("Linux version")
	s.begins()
	s.types("echo \"<$kept>\" and $((20+4))\r")
	s.sees("<> and 24")
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.sees("left the console of web")
	s.left(0)
	if log := a.Must(t, "logs", "web"); !strings.Contains(log, "here still") {
		t.Errorf("the console's log lacks what was said: %q", log)
	}
}

// measured asks what the machine uses while it works.
func measured(t *testing.T, a alive) {
	ctx, cancel := context.WithCancel(t.Context())
	busy := a.Command("exec", "web", "--", "sh", "-c", "echo; while :; do :; done")
	out, err := busy.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := busy.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cancel(); _ = busy.Process.Kill(); _ = busy.Wait() }()
	if _, err := out.Read(make([]byte, 1)); err != nil || ctx.Err() != nil {
		t.Fatal(err)
	}
	var v struct {
		Machines []struct {
			CPUPercent       float64 `json:"cpu_percent"`
			MemoryBytes      int64   `json:"memory_bytes"`
			GuestMemoryBytes int64   `json:"guest_memory_bytes"`
			GuestUsedBytes   int64   `json:"guest_used_bytes"`
			DiskBytes        int64   `json:"disk_bytes"`
			UpMS             int64   `json:"up_ms"`
			Silent           string
		}
	}
	began := time.Now()
	a.JSON(t, &v, "stats", "web")
	t.Logf("%+v in %v", v, time.Since(began))
	m := v.Machines[0]
	if m.CPUPercent < 5 || m.CPUPercent > 400 || m.MemoryBytes < 16<<20 || m.GuestMemoryBytes < 128<<20 || m.GuestMemoryBytes > 256<<20 ||
		m.GuestUsedBytes < 8<<20 || m.GuestUsedBytes > m.GuestMemoryBytes || m.DiskBytes == 0 || m.UpMS == 0 || m.Silent != "" {
		t.Errorf("%+v", m)
	}
}

// renamed has another name, and the guest hears of it at its next start.
func renamed(t *testing.T, a alive) {
	a.Must(t, "expose", "web", "8080", "--host", "app.localhost")
	a.Must(t, "rename", "web", "web2")
	if host := a.Must(t, "exec", "web2", "--", "hostname"); host != "web\n" {
		t.Errorf("the guest is called %q while it runs", host)
	}
	if list := a.Must(t, "checkpoint", "ls", "web2") + a.Must(t, "routes"); !strings.Contains(list, "here") || !strings.Contains(list, "web2 ") {
		t.Errorf("it has lost something: %s", list)
	}
}

// comesBack ends the machine from inside and from outside.
func comesBack(t *testing.T, a alive) {
	boots := func() string {
		r, _ := a.Run("exec", "web2", "--", "sh", "-c", "cat /proc/sys/kernel/random/boot_id; hostname")
		return r.Stdout
	}
	before := boots()
	again := func(how string) {
		t.Helper()
		began := time.Now()
		await(t, func() error {
			if now := boots(); now == before || !strings.HasSuffix(now, "\nweb2\n") {
				return fmt.Errorf("%s: it has not come back: %q", how, now)
			}
			return nil
		})
		before = boots()
		t.Logf("%s: back after %.1f s", how, time.Since(began).Seconds())
	}
	if _, err := a.Run("exec", "web2", "--", "sh", "-c", "sync; echo o >/proc/sysrq-trigger; sleep 60"); err != nil {
		t.Log(err) // it ended over it
	}
	again("powered off by itself")
	var v struct {
		Machine struct {
			QEMUPID int `json:"qemu_pid"`
		}
	}
	a.JSON(t, &v, "inspect", "web2")
	if err := syscall.Kill(v.Machine.QEMUPID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	again("killed")
	a.Must(t, "stop", "web2", "--force")
	if list := a.Must(t, "ls"); !strings.Contains(list, "stopped") {
		t.Error(list)
	}
	a.Must(t, "rm", "web2", "--force")
	a.clean(t)
}
