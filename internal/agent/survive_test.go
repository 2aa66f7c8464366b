//go:build linux

package agent_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func commands(t *testing.T, m *machine) []*agentv1.Command {
	t.Helper()
	list, err := m.ListCommands(testCtx(t), connect.NewRequest(&agentv1.ListCommandsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	return list.Msg.GetCommands()
}

// awaitCommand waits until the only command is as ok says.
func awaitCommand(t *testing.T, m *machine, ok func(*agentv1.Command) bool) *agentv1.Command {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		list := commands(t, m)
		if len(list) == 1 && ok(list[0]) {
			return list[0]
		}
		if time.Now().After(deadline) {
			t.Fatalf("commands: %v", list)
		}
	}
}

const counting = `trap 'echo hup > hup' HUP; echo up; while read x; do echo "got $x"; done; echo end; exit 6`

// TestCommandsSurviveTheirConversation: what runs when the host begins anew,
// as it does with a restored guest, goes on, keeps its input open, and can be
// attached to with all that it printed.
func TestCommandsSurviveTheirConversation(t *testing.T) {
	m := configured(t)
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", counting}})
	stdin(t, st, "1\n")
	_, started := until(t, st, "got 1\n")
	for range 2 { // a kept one survives another time
		m.again()
		c := awaitCommand(t, m, func(c *agentv1.Command) bool { return c.GetDetached() && !c.GetAttached() })
		if c.GetId() != started.GetCommandId() || !c.GetRunning() {
			t.Fatalf("listed %v", c)
		}
	}
	at := attach(t, m, started.GetCommandId(), false)
	stdin(t, at, "2\n")
	if got, _ := until(t, at, "got 2\n"); got != "up\ngot 1\ngot 2\n" {
		t.Errorf("attached: %q", got)
	}
	// It belongs to no stream any more: leaving ends neither it nor its input.
	_, _ = at.CloseRequest(), at.CloseResponse()
	awaitCommand(t, m, func(c *agentv1.Command) bool { return !c.GetAttached() })
	at = attach(t, m, started.GetCommandId(), true)
	stdin(t, at, "3\n")
	until(t, at, "got 3\n")
	if err := at.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_StdinEnd{StdinEnd: &agentv1.StdinEnd{}}}); err != nil {
		t.Fatal(err)
	}
	if r := finish(t, at); r.exit.GetCode() != 6 || r.stdout != "end\n" {
		t.Errorf("got %+v", r)
	}
	if list := commands(t, m); len(list) != 0 {
		t.Errorf("commands: %v", list)
	}
	if r := sh(t, m, "ls hup"); r.exit.GetCode() == 0 {
		t.Error("the command was hung up")
	}
}

// TestEndsWithoutConversation: the exit code and the end of the output of a
// survivor that ends on its own wait for somebody to attach. It is not held up
// by the reader that vanished.
func TestEndsWithoutConversation(t *testing.T) {
	m := configured(t)
	script := `echo up; until [ -e go ]; do sleep 0.01; done; head -c 5000000 /dev/zero; echo END; exit 3`
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", script}})
	until(t, st, "up\n")
	m.again()
	sh(t, m, "touch go")
	c := awaitCommand(t, m, func(c *agentv1.Command) bool { return !c.GetRunning() })
	r := finish(t, attach(t, m, c.GetId(), false))
	if n := len(r.stdout); !strings.HasSuffix(r.stdout, "END\n") || n > 1<<20 || n < 1<<19 || r.exit.GetCode() != 3 || r.exit.GetDroppedBytes() == 0 {
		t.Errorf("got %d bytes, %v", n, r.exit)
	}
	_, err := readAll(attach(t, m, c.GetId(), false))
	wantKind(t, err, errdefs.NotFound)
}

// TestTerminalSurvives: a shell at a terminal is one of the commands that do.
func TestTerminalSurvives(t *testing.T) {
	m := configured(t)
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"sh"}, Tty: true, Size: &agentv1.WindowSize{Rows: 20, Cols: 70}})
	stdin(t, st, "echo $((40+2))\n")
	_, started := until(t, st, "42\r\n")
	m.again()
	awaitCommand(t, m, func(c *agentv1.Command) bool { return c.GetRunning() && !c.GetAttached() })
	at := attach(t, m, started.GetCommandId(), true)
	stdin(t, at, "stty size; exit 5\n")
	if r := finish(t, at); !strings.Contains(r.stdout, "20 70\r\n") || r.exit.GetCode() != 5 {
		t.Errorf("got %+v", r)
	}
}

// TestClosedStreamInAStandingConversation: after a restore too, a stream that
// its user closes hangs up, and others stay.
func TestClosedStreamInAStandingConversation(t *testing.T) {
	m := configured(t)
	m.again()
	script := `trap 'echo hup > hup; exit' HUP; echo up; while :; do sleep 0.01; done`
	other := start(t, m, &agentv1.ExecStart{Argv: []string{"cat"}})
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", script}})
	until(t, st, "up\n")
	_ = st.CloseResponse()
	awaitFile(t, filepath.Join(m.world, "hup"), "hup\n")
	stdin(t, other, "still here\n")
	until(t, other, "still here\n")
	_ = other.CloseRequest()
	finish(t, other)
}
