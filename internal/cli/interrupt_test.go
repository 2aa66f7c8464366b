//go:build unix

package cli_test

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"go.uber.org/goleak"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/cli"
)

// mainVar makes the test binary a holdpoint: for tests that need a process of
// their own.
const mainVar = "HOLDPOINT_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainVar) != "" {
		os.Exit(childMain())
	}
	goleak.VerifyTestMain(m)
}

// command is a holdpoint process for the home.
func command(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, append([]string{"--home", dir}, args...)...)
	cmd.Env = append(os.Environ(), mainVar+"=test")
	return cmd
}

func signalAfterAdmission(t *testing.T, f *fake, cmd *exec.Cmd, sig os.Signal) {
	t.Helper()
	select {
	case <-f.admitted:
	case <-time.After(10 * time.Second):
		t.Fatal("nothing was admitted")
	}
	if err := cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// Ctrl-C cancels what a person expects to end; a hang-up or a termination of
// the client only ends the wait.
func TestInterrupt(t *testing.T) {
	for _, test := range []struct {
		args    string
		sig     os.Signal
		cancels bool
		says    string
	}{
		{"run web --image debian", os.Interrupt, true, "run web: canceled and undone"},
		{"image build debian", os.Interrupt, true, "image build: canceled and undone"},
		{"checkpoint create web", os.Interrupt, true, "checkpoint create web: canceled and undone"},
		{"restore web before-agent --disk --yes", os.Interrupt, true, "restore web: canceled and undone"},
		{"run web --image debian", syscall.SIGTERM, false, "operation op-run goes on: watch it with `holdpoint operation wait op-run`"},
		{"checkpoint create web", syscall.SIGHUP, false, "operation op-checkpoint-create goes on"},
		{"stop web", os.Interrupt, false, "operation op-stop goes on"},
		{"expose web 80", os.Interrupt, false, "operation op-expose goes on"},
		{"fork green --count 8", os.Interrupt, false, "operation op-fork goes on"},
		{"fork green -- echo x", os.Interrupt, false, "operation op-fork goes on"},
		{"suspend web", os.Interrupt, false, "operation op-suspend goes on"},
	} {
		t.Run(test.args+" "+test.sig.String(), func(t *testing.T) {
			f, dir := serve(t, func(f *fake) { f.running = true })
			cmd := command(t, dir, split(test.args)...)
			var stderr strings.Builder
			cmd.Stderr = &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			signalAfterAdmission(t, f, cmd, test.sig)
			_ = cmd.Wait() // its code is looked at
			if code := cmd.ProcessState.ExitCode(); code != 130 {
				t.Errorf("exit code %d", code)
			}
			if !strings.Contains(stderr.String(), test.says) {
				t.Errorf("stderr %q", stderr.String())
			}
			select {
			case <-f.canceled:
				if !test.cancels {
					t.Error("the operation was canceled")
				}
			default:
				if test.cancels {
					t.Error("the operation was not canceled")
				}
			}
		})
	}
}

// speaking is a process of its own whose command in the machine has said something.
func speaking(t *testing.T, dir string, args ...string) (cmd *exec.Cmd, stderr *strings.Builder) {
	t.Helper()
	cmd, stderr = command(t, dir, args...), &strings.Builder{}
	cmd.Stderr = stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	return cmd, stderr
}

// A signal reaches the command in the machine; before the command has started
// it ends the wait for it.
func TestExecSignals(t *testing.T) {
	begun := make(chan struct{})
	_, dir := serve(t, func(f *fake) { f.guest.begun = begun })
	cmd, _ := speaking(t, dir, "exec", "web", "--", "trap")
	_ = cmd.Process.Signal(syscall.SIGUSR1) // it runs
	_ = cmd.Wait()                          // its code is looked at
	if code := cmd.ProcessState.ExitCode(); code != 20 {
		t.Errorf("exit code %d, want 10 + SIGUSR1 of Linux", code)
	}
	cmd = command(t, dir, "exec", "web", "--", "wait")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-begun
	_ = cmd.Process.Signal(os.Interrupt) // it runs
	_ = cmd.Wait()                       // its code is looked at
	if code := cmd.ProcessState.ExitCode(); code != 130 || !strings.Contains(stderr.String(), "interrupted before the command started") {
		t.Errorf("exit code %d, stderr %q", code, stderr.String())
	}
}

// A command that does not end by interrupts is given up at the third in a row.
func TestExecGivenUp(t *testing.T) {
	for _, test := range []struct {
		signals []os.Signal
		ends    bool
	}{
		{[]os.Signal{os.Interrupt, syscall.SIGTERM}, false},
		{[]os.Signal{os.Interrupt, os.Interrupt, syscall.SIGUSR1, os.Interrupt}, false},
		{[]os.Signal{os.Interrupt, syscall.SIGTERM, os.Interrupt}, true},
	} {
		_, dir := serve(t)
		cmd, stderr := speaking(t, dir, "exec", "web", "--", "hang")
		for _, s := range test.signals {
			_ = cmd.Process.Signal(s)          // it runs
			time.Sleep(100 * time.Millisecond) // that it is one of its own
		}
		ended := make(chan struct{})
		go func() {
			_ = cmd.Wait() // its code is looked at
			close(ended)
		}()
		patience := 500 * time.Millisecond
		if test.ends {
			patience = 10 * time.Second
		}
		select {
		case <-ended:
			if code := cmd.ProcessState.ExitCode(); !test.ends || code != 130 || !strings.Contains(stderr.String(), "interrupted; the command was hung up") {
				t.Errorf("%v: exit code %d, stderr %q", test.signals, code, stderr.String())
			}
		case <-time.After(patience):
			if test.ends {
				t.Errorf("%v: it goes on", test.signals)
			}
			_ = cmd.Process.Kill()
			<-ended
		}
	}
}

// A signal that ends attach, or a closed terminal, leaves the command; only
// interrupts are the command's.
func TestAttachLeaves(t *testing.T) {
	for _, test := range []struct {
		command string
		sig     syscall.Signal
		code    int
		left    bool
	}{
		{"trap", syscall.SIGTERM, 0, true},
		{"trap", syscall.SIGHUP, 0, true},
		{"trap", syscall.SIGUSR1, 0, true},
		{"hang", syscall.SIGTERM, 0, true},
		{"trap", syscall.SIGINT, 12, false},
		{"trap", syscall.SIGQUIT, 13, false},
	} {
		_, dir := serve(t, func(f *fake) { f.commands = []*agentv1.Command{{Id: test.command, Detached: true}} })
		cmd, stderr := speaking(t, dir, "attach", "web")
		_ = cmd.Process.Signal(test.sig) // it runs
		_ = cmd.Wait()                   // its code is looked at
		code, left := cmd.ProcessState.ExitCode(), strings.Contains(stderr.String(), "left; the command goes on: `holdpoint attach web "+test.command+"`")
		if code != test.code || left != test.left {
			t.Errorf("%s, %v: exit code %d, stderr %q", test.command, test.sig, code, stderr.String())
		}
	}
}

// A command whose terminal here is closed is not told that its input ended.
func TestAttachTerminalCloses(t *testing.T) {
	inputs := make(chan string, 1)
	_, dir := serve(t, func(f *fake) {
		f.guest.inputs = inputs
		f.commands = []*agentv1.Command{{Id: "input", Detached: true, Tty: true}}
	})
	c := onTerminal(t, dir, "attach", "web")
	c.expect("$ ")
	c.tty.Close()
	_ = c.cmd.Wait() // its code is looked at
	if code := c.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if first := <-inputs; first != "closed" {
		t.Errorf("the command's input: %s", first)
	}
}

// Signals reach the commands in all machines of a fork.
func TestForkSignals(t *testing.T) {
	_, dir := serve(t)
	cmd := command(t, dir, "fork", "green", "--count", "2", "--", "trap")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for range 2 {
		if !lines.Scan() || !strings.HasSuffix(lines.Text(), " | ready") {
			t.Fatalf("%q, %v", lines.Text(), lines.Err())
		}
	}
	_ = cmd.Process.Signal(os.Interrupt) // it runs
	_ = cmd.Wait()                       // its code is looked at
	if code := cmd.ProcessState.ExitCode(); code != 12 {
		t.Errorf("exit code %d, want 10 + SIGINT of Linux", code)
	}
}

// console is a holdpoint process on a terminal.
type console struct {
	t    *testing.T
	cmd  *exec.Cmd
	tty  *os.File
	seen strings.Builder
}

func onTerminal(t *testing.T, dir string, args ...string) *console {
	t.Helper()
	cmd := command(t, dir, args...)
	cmd.Env = append(cmd.Env, "TERM=xterm")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 30, Cols: 100})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	if err := tty.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return &console{t: t, cmd: cmd, tty: tty}
}

// expect reads until the text is seen.
func (c *console) expect(text string) {
	c.t.Helper()
	buf := make([]byte, 4096)
	for !strings.Contains(c.seen.String(), text) {
		n, err := c.tty.Read(buf)
		c.seen.Write(buf[:n])
		if err != nil && !strings.Contains(c.seen.String(), text) {
			c.t.Fatalf("waiting for %q: %v; seen %q", text, err, c.seen.String())
		}
	}
}

func (c *console) typed(text string) {
	c.t.Helper()
	if _, err := c.tty.WriteString(text); err != nil {
		c.t.Fatal(err)
	}
}

// code reads the rest and gives the exit code.
func (c *console) code() int {
	buf := make([]byte, 4096)
	for {
		n, err := c.tty.Read(buf)
		c.seen.Write(buf[:n])
		if err != nil {
			break
		}
	}
	_ = c.cmd.Wait() // its code is looked at
	return c.cmd.ProcessState.ExitCode()
}

// On a terminal a restore warns of the URL that will break, offers to put the
// routes back, and asks.
func TestRestoreAsks(t *testing.T) {
	f, dir := serve(t)
	c := onTerminal(t, dir, "restore", "web", "before-agent", "--disk")
	c.expect("the URL of app.localhost will be broken: the route leads to port 9090")
	c.expect("Put the routes back to what they were, too? [y/N]")
	c.typed("y\n")
	c.expect("Restore disk of web now? [y/N]")
	c.typed("yes\n")
	if code := c.code(); code != 0 || !strings.Contains(c.seen.String(), "holdpoint restore web c2000000000000aa --disk") {
		t.Errorf("exit code %d, seen %q", code, c.seen.String())
	}
	if req := asked[*holdpointv1.RestoreMachineRequest](t, f); req.GetRoutes() != "restore" {
		t.Errorf("request %v", req)
	}
	f.asks()
	c = onTerminal(t, dir, "restore", "web", "before-agent", "--disk", "--routes=keep")
	c.expect("Restore disk of web now? [y/N]")
	c.typed("\n")
	code, requests := c.code(), f.asks()
	if code != 130 || len(requests) != 0 || !strings.Contains(c.seen.String(), "nothing was changed") {
		t.Errorf("exit code %d, requests %v, seen %q", code, requests, c.seen.String())
	}
}

// On a terminal a stopped checkpoint asks before it ends commands.
func TestCheckpointAsks(t *testing.T) {
	f, dir := serve(t, func(f *fake) {
		f.commands = []*agentv1.Command{{Id: "cmd-1", Argv: []string{"make", "all"}, Running: true}}
	})
	c := onTerminal(t, dir, "checkpoint", "create", "web", "--kind", "disk", "--mode", "stopped")
	c.expect("make all")
	c.expect("A stopped checkpoint ends 1 running command in web. Go on? [y/N]")
	c.typed("y\n")
	c.expect("stopping the guest")
	if code := c.code(); code != 0 || !asked[*holdpointv1.CreateCheckpointRequest](t, f).GetStopRunning() {
		t.Errorf("exit code %d, seen %q", code, c.seen.String())
	}
}

// What commands in many machines print cannot move the cursor of a terminal.
func TestForkOnTerminal(t *testing.T) {
	_, dir := serve(t)
	c := onTerminal(t, dir, "fork", "green", "--count", "2", "--", "index")
	if code := c.code(); code != 0 || !strings.Contains(c.seen.String(), "try-2 | [31mtwo\r\n") || strings.Contains(c.seen.String(), "\x1b[31m") {
		t.Errorf("exit code %d, seen %q", code, c.seen.String())
	}
}

// A terminal is raw while a command has it: Ctrl-C goes to the machine as a
// byte, sizes follow, and afterwards the terminal is as before.
func TestShellOnTerminal(t *testing.T) {
	f, dir := serve(t)
	c := onTerminal(t, dir, "shell", "web")
	c.expect("$ ")
	c.typed("\x03")
	c.expect("\x03") // as it is: not the "^C" that a cooked terminal echoes
	start := asked[*holdpointv1.GuestExecRequest](t, f).GetMessage().GetStart()
	if !start.GetTty() || start.GetSize().GetRows() != 30 || start.GetSize().GetCols() != 100 || start.GetEnv()[0] != "TERM=xterm" {
		t.Errorf("start %v", start)
	}
	if err := pty.Setsize(c.tty, &pty.Winsize{Rows: 40, Cols: 120}); err != nil {
		t.Fatal(err)
	}
	c.expect("size 40x120")
	c.typed("exit\r")
	if code := c.code(); code != 5 {
		t.Errorf("exit code %d, seen %q", code, c.seen.String())
	}
}

func childMain() int {
	cfg := cli.Config{Version: os.Getenv(mainVar), RunDaemon: childDaemon}
	return cli.Main(cfg)
}
