//go:build linux

package agent_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/agent"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/wire"
)

func TestMain(m *testing.M) {
	if signal.Ignored(syscall.SIGHUP) { // as below nohup; what is caught is no more ignored in children
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
	goleak.VerifyTestMain(m)
}

// machine is an agent served over a socket, as in a guest over its port.
type machine struct {
	agentv1connect.AgentServiceClient
	world string
	off   chan struct{}
	drop  func() // the host goes away
	again func() // the host begins another conversation, without a word on the one before
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	return serve(t, func(*agent.Config) {})
}

// serve serves an agent of the configuration that edit makes.
func serve(t *testing.T, edit func(*agent.Config)) *machine {
	t.Helper()
	m := &machine{world: t.TempDir(), off: make(chan struct{})}
	cfg := agent.Config{
		Build: "test", World: m.world, Path: os.Getenv("PATH"), PowerOff: func() { close(m.off) },
	}
	edit(&cfg)
	a, err := agent.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	host, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	port, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	magic := link.NewMagic()
	go func() { defer close(served); _ = a.Serve(ctx, link.NewGuest(port, magic)) }()
	var closers []func()
	m.again = func() {
		if n := len(closers); n > 0 {
			closers[n-1]()
		}
		conn, err := link.Host(testCtx(t), host, magic)
		if err != nil {
			t.Fatal(err)
		}
		v := &vanishing{Conn: conn, host: host}
		tr := link.NewTransport(v)
		m.AgentServiceClient = agentv1connect.NewAgentServiceClient(&http.Client{Transport: tr}, "http://guest")
		closers = append(closers, func() { v.vanish(); tr.CloseIdleConnections() })
	}
	m.again()
	m.drop = func() { _ = host.Close() }
	t.Cleanup(func() {
		for _, c := range closers {
			c()
		}
		_ = host.Close()
		cancel()
		<-served
		a.Close()
	})
	return m
}

// vanishing is a conversation whose end at the host can go without the guest
// learning of it: nothing is said any more, and the channel stays open.
type vanishing struct {
	net.Conn
	host net.Conn

	mu      sync.Mutex
	gone    bool
	reading sync.Mutex
}

func (v *vanishing) vanish() {
	v.mu.Lock()
	first := !v.gone
	v.gone = true
	v.mu.Unlock()
	if first {
		_ = v.host.SetReadDeadline(time.Unix(1, 0))
		v.reading.Lock()
		_ = v.host.SetReadDeadline(time.Time{})
		v.reading.Unlock()
	}
}

func (v *vanishing) Read(p []byte) (int, error) {
	v.reading.Lock()
	defer v.reading.Unlock()
	if v.over() {
		return 0, io.EOF
	}
	return v.Conn.Read(p)
}

func (v *vanishing) Write(p []byte) (int, error) {
	if v.over() {
		return 0, io.ErrClosedPipe
	}
	return v.Conn.Write(p)
}

func (v *vanishing) over() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.gone
}

func (v *vanishing) Close() error { return nil }

func configured(t *testing.T) *machine {
	t.Helper()
	m := newMachine(t)
	if _, err := m.Configure(testCtx(t), connect.NewRequest(&agentv1.ConfigureRequest{})); err != nil {
		t.Fatal(err)
	}
	return m
}

func testCtx(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

type stream = connect.BidiStreamForClient[agentv1.ExecRequest, agentv1.ExecResponse]

func start(t *testing.T, m *machine, s *agentv1.ExecStart) *stream {
	t.Helper()
	st := m.Exec(testCtx(t))
	if err := st.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: s}}); err != nil && !errors.Is(err, io.EOF) { // EOF: reading tells why
		t.Fatal(err)
	}
	return st
}

func attach(t *testing.T, m *machine, id string, noHistory bool) *stream {
	t.Helper()
	st := m.Exec(testCtx(t))
	if err := st.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Attach{
		Attach: &agentv1.ExecAttach{CommandId: id, NoHistory: noHistory},
	}}); err != nil {
		t.Fatal(err)
	}
	return st
}

func stdin(t *testing.T, st *stream, p string) {
	t.Helper()
	if err := st.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Stdin{Stdin: []byte(p)}}); err != nil {
		t.Fatal(err)
	}
}

// result is all that a stream said.
type result struct {
	started        *agentv1.ExecStarted
	stdout, stderr string
	exit           *agentv1.ExecExit
}

func finish(t *testing.T, st *stream) result {
	t.Helper()
	r, err := readAll(st)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func readAll(st *stream) (result, error) {
	var r result
	var o, e bytes.Buffer
	for {
		m, err := st.Receive()
		r.stdout, r.stderr = o.String(), e.String()
		if errors.Is(err, io.EOF) && r.exit != nil {
			return r, st.CloseResponse()
		}
		if err != nil {
			return r, err
		}
		if m.GetStarted() != nil {
			r.started = m.GetStarted()
		}
		o.Write(m.GetStdout())
		e.Write(m.GetStderr())
		if r.exit = m.GetExit(); r.exit != nil {
			_ = st.CloseRequest()
		}
	}
}

// until reads a stream up to the line.
func until(t *testing.T, st *stream, line string) (before string, started *agentv1.ExecStarted) {
	t.Helper()
	for !strings.Contains(before, line) {
		m, err := st.Receive()
		if err != nil {
			t.Fatalf("after %q: %v", before, err)
		}
		if m.GetStarted() != nil {
			started = m.GetStarted()
		}
		before += string(m.GetStdout())
	}
	return before, started
}

func sh(t *testing.T, m *machine, script string) result {
	t.Helper()
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", script}})
	_ = st.CloseRequest()
	return finish(t, st)
}

func wantKind(t *testing.T, err error, kind errdefs.Kind) {
	t.Helper()
	if got := errdefs.KindOf(wire.Decode(err)); err == nil || got != kind {
		t.Errorf("error %v of kind %s, want %s", err, got, kind)
	}
}

func TestPingAndConfigure(t *testing.T) {
	m := newMachine(t)
	ping := func() *agentv1.PingResponse {
		t.Helper()
		r, err := m.Ping(testCtx(t), connect.NewRequest(&agentv1.PingRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg
	}
	p := ping()
	if p.GetConfigured() || p.GetBuild() != "test" || p.GetBootId() == "" || p.GetUptimeNano() <= 0 ||
		time.Since(time.Unix(0, p.GetUnixNano())).Abs() > time.Minute {
		t.Errorf("ping: %v", p)
	}
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"true"}})
	_, err := readAll(st)
	wantKind(t, err, errdefs.WrongState)

	conf := func() *agentv1.ConfigureRequest {
		return &agentv1.ConfigureRequest{
			Hostname: "web", MachineId: strings.Repeat("0f", 16), UnixNano: 1, Entropy: []byte{1},
			Network: &agentv1.NetworkDevice{Nameservers: []string{"198.18.0.1"}},
			OnBoot:  `pwd; echo oops >&2; echo again >> ran; exit 3`,
		}
	}
	for _, bad := range []*agentv1.ConfigureRequest{{Hostname: "a b"}, {MachineId: "x"}, {Tmpfs: []string{"/"}}, {Network: &agentv1.NetworkDevice{Gateways: []string{"x"}}}, {Tmpfs: []string{"rel"}}} {
		_, err := m.Configure(testCtx(t), connect.NewRequest(bad))
		wantKind(t, err, errdefs.Invalid)
	}
	for range 2 { // the second time changes nothing
		if _, err := m.Configure(testCtx(t), connect.NewRequest(conf())); err != nil {
			t.Fatal(err)
		}
	}
	other := conf()
	other.Hostname = "other"
	_, err = m.Configure(testCtx(t), connect.NewRequest(other))
	wantKind(t, err, errdefs.WrongState)
	if !ping().GetConfigured() {
		t.Error("not configured")
	}
	for name, want := range map[string]string{
		"etc/hostname": "web\n", "etc/machine-id": strings.Repeat("0f", 16) + "\n",
		"etc/hosts":       "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 web\n",
		"etc/resolv.conf": "nameserver 198.18.0.1\n",
	} {
		if b, err := os.ReadFile(filepath.Join(m.world, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	r := sh(t, m, "until [ -s ran ] && grep -q oops run/holdpoint/on-boot.log; do sleep 0.01; done; cat ran run/holdpoint/on-boot.log")
	if want := "again\n" + m.world + "\noops\n"; r.stdout != want {
		t.Errorf("on-boot: %q, want %q", r.stdout, want)
	}
	list, err := m.ListCommands(testCtx(t), connect.NewRequest(&agentv1.ListCommandsRequest{}))
	if err != nil || len(list.Msg.GetCommands()) != 0 {
		t.Errorf("commands: %v, %v", list, err)
	}
}

func TestExitCodes(t *testing.T) {
	m := configured(t)
	if err := os.WriteFile(filepath.Join(m.world, "noexec"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.world, "nointerp"), []byte("#!/no/such\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.world, "noformat"), []byte("echo x\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		s    *agentv1.ExecStart
		code int32
		text string
	}{
		{&agentv1.ExecStart{Argv: []string{"sh", "-c", "exit 0"}}, 0, ""},
		{&agentv1.ExecStart{Argv: []string{"sh", "-c", "exit 255"}}, 255, ""},
		{&agentv1.ExecStart{Argv: []string{"sh", "-c", "kill -TERM $$"}}, 143, ""},
		{&agentv1.ExecStart{Argv: []string{"sh", "-c", "kill -KILL $$"}}, 137, ""},
		{&agentv1.ExecStart{Argv: []string{"no-such-command"}}, 127, `run "no-such-command": command not found in PATH`},
		{&agentv1.ExecStart{Argv: []string{"./missing"}}, 127, "no such file"},
		{&agentv1.ExecStart{Argv: []string{"./nointerp"}}, 127, "interpreter"},
		{&agentv1.ExecStart{Argv: []string{"./noexec"}}, 126, "permission denied"},
		{&agentv1.ExecStart{Argv: []string{"./noformat"}}, 126, "no program"},
		{&agentv1.ExecStart{Argv: []string{"/"}}, 126, "permission denied"},
		{&agentv1.ExecStart{}, 126, "empty"},
		{&agentv1.ExecStart{Argv: []string{"true"}, Cwd: "/missing"}, 126, "no such folder"},
		{&agentv1.ExecStart{Argv: []string{"true"}, User: "nobody-here"}, 126, "no such account"},
		{&agentv1.ExecStart{Argv: []string{"true"}, User: "0:nobody-here"}, 126, "no such group"},
	} {
		st := start(t, m, tc.s)
		_ = st.CloseRequest()
		r := finish(t, st)
		if r.exit.GetCode() != tc.code || !strings.Contains(r.exit.GetError(), tc.text) || (tc.text == "") != (r.exit.GetError() == "") {
			t.Errorf("%v: exit %v, want %d with %q", tc.s, r.exit, tc.code, tc.text)
		}
	}
}

func TestStreamsAndEnvironment(t *testing.T) {
	m := configured(t)
	if err := os.Mkdir(filepath.Join(m.world, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	st := start(t, m, &agentv1.ExecStart{
		Argv: []string{"sh", "-c", `echo "$A/$HOME/$PWD"; cat; echo err >&2`}, Env: []string{"A=1", "A=2", "bad"}, Cwd: "/sub",
	})
	stdin(t, st, "one ")
	stdin(t, st, "two")
	_ = st.CloseRequest()
	r := finish(t, st)
	if want := "2/" + m.world + "/" + m.world + "/sub\none two"; r.stdout != want || r.stderr != "err\n" || r.exit.GetCode() != 0 {
		t.Errorf("got %+v, want %q", r, want)
	}
}

// TestMuchData: 8 MiB through cat, so that both directions block, whole.
func TestMuchData(t *testing.T) {
	m := configured(t)
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"cat"}})
	line := strings.Repeat("0123456789abcdef", 4096)
	go func() {
		for range 128 {
			_ = st.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Stdin{Stdin: []byte(line)}})
		}
		_ = st.CloseRequest()
	}()
	if r := finish(t, st); r.stdout != strings.Repeat(line, 128) || r.exit.GetCode() != 0 {
		t.Errorf("got %d bytes, %v", len(r.stdout), r.exit)
	}
}

// TestOutputBeforeExitIsWhole: what a command wrote is delivered though a
// child in the background holds the output open.
func TestOutputBeforeExitIsWhole(t *testing.T) {
	m := configured(t)
	begun := time.Now()
	r := sh(t, m, "head -c 3000000 /dev/zero; sleep 100 & echo $! > pid; head -c 100000 /dev/zero")
	if len(r.stdout) != 3100000 || r.exit.GetCode() != 0 {
		t.Errorf("got %d bytes, %v", len(r.stdout), r.exit)
	}
	if d := time.Since(begun); d > 10*time.Second {
		t.Errorf("the exit was reported after %v", d)
	}
	sh(t, m, "kill $(cat pid)")
	r = sh(t, m, "yes & echo $! > pid") // one that prints for ever
	if r.exit.GetCode() != 0 {
		t.Errorf("exit %v", r.exit)
	}
	sh(t, m, "kill $(cat pid)")
	if r := sh(t, m, "(sleep 0.05; echo late) &"); r.stdout != "late\n" {
		t.Errorf("output of a short helper: %q", r.stdout)
	}
}

func TestSignal(t *testing.T) {
	m := configured(t)
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", `trap 'echo got; exit 7' USR1; echo up; sleep 100 & wait`}})
	until(t, st, "up\n")
	// The command does not read: signals overtake what waits for it.
	stdin(t, st, strings.Repeat("x", 200_000))
	if err := st.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Signal{Signal: 10}}); err != nil {
		t.Fatal(err)
	}
	if r := finish(t, st); r.stdout != "got\n" || r.exit.GetCode() != 7 {
		t.Errorf("got %+v", r)
	}
}

func TestTerminal(t *testing.T) {
	m := configured(t)
	st := start(t, m, &agentv1.ExecStart{
		Argv: []string{"sh", "-c", `stty size; tty; echo err >&2; read x; stty size; exit 5`},
		Tty:  true, Size: &agentv1.WindowSize{Rows: 33, Cols: 99},
	})
	out, _ := until(t, st, "err\r\n")
	if !strings.HasPrefix(out, "33 99\r\n/dev/pts/") {
		t.Errorf("got %q", out)
	}
	if err := st.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Resize{Resize: &agentv1.WindowSize{Rows: 11, Cols: 22}}}); err != nil {
		t.Fatal(err)
	}
	stdin(t, st, "go\n")
	if r := finish(t, st); !strings.Contains(r.stdout, "11 22\r\n") || r.stderr != "" || r.exit.GetCode() != 5 {
		t.Errorf("got %+v", r)
	}
}

// TestHangUp: the command of a stream that breaks gets SIGHUP.
func TestHangUp(t *testing.T) {
	for name, leave := range map[string]func(st *stream, m *machine){
		"stream": func(st *stream, _ *machine) { _ = st.CloseResponse() },
		"link":   func(_ *stream, m *machine) { m.drop() },
	} {
		t.Run(name, func(t *testing.T) {
			m := configured(t)
			st := m.Exec(testCtx(t))
			script := `trap 'echo hup > hup; exit' HUP; echo up; while :; do sleep 0.01; done`
			_ = st.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: &agentv1.ExecStart{Argv: []string{"sh", "-c", script}}}})
			until(t, st, "up\n")
			leave(st, m)
			awaitFile(t, filepath.Join(m.world, "hup"), "hup\n")
		})
	}
}

func awaitFile(t *testing.T, name, want string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		b, _ := os.ReadFile(name)
		if string(b) == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s holds %q, want %q", name, b, want)
		}
	}
}

func TestDetached(t *testing.T) {
	m := configured(t)
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", `echo one; read a; echo "two $a"; read b; echo "three $b"; exit 9`}, Detach: true})
	_, started := until(t, st, "one\n")
	_ = st.CloseRequest()
	_ = st.CloseResponse() // leaves; the command goes on
	id := started.GetCommandId()

	st = attach(t, m, id, false)
	until(t, st, "one\n")
	stdin(t, st, "A\n")
	until(t, st, "two A\n")
	second := attach(t, m, id, true) // from now on
	if m, err := second.Receive(); err != nil || m.GetStarted().GetCommandId() != id {
		t.Fatalf("%v, %v", m, err)
	}
	stdin(t, second, "B\n")
	for name, s := range map[string]*stream{"first": st, "second": second} {
		if r := finish(t, s); r.stdout != "three B\n" || r.exit.GetCode() != 9 {
			t.Errorf("%s: %+v", name, r)
		}
	}
	_, err := readAll(attach(t, m, id, false))
	wantKind(t, err, errdefs.NotFound)
}

// TestDetachedWithoutInput starts a reader of nothing, whose starter leaves
// without saying that nothing follows.
func TestDetachedWithoutInput(t *testing.T) {
	m := configured(t)
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", "cat; echo end; exit 3"}, Detach: true, NoInput: true})
	_, started := until(t, st, "end\n")
	_ = st.CloseRequest()
	_ = st.CloseResponse()
	if r := finish(t, attach(t, m, started.GetCommandId(), false)); r.stdout != "end\n" || r.exit.GetCode() != 3 {
		t.Errorf("%+v", r)
	}
}

func TestDetachedKeepsTheEnd(t *testing.T) {
	m := configured(t)
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", "read x; head -c 5000000 /dev/zero; echo END; exit 4"}, Detach: true})
	first, err := st.Receive()
	if err != nil {
		t.Fatal(err)
	}
	started := first.GetStarted()
	stdin(t, st, "\n")
	if _, err := st.Receive(); err != nil { // it prints
		t.Fatal(err)
	}
	_ = st.CloseRequest()
	_ = st.CloseResponse()
	var c *agentv1.Command
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		list, err := m.ListCommands(testCtx(t), connect.NewRequest(&agentv1.ListCommandsRequest{}))
		if err != nil || time.Now().After(deadline) || len(list.Msg.GetCommands()) != 1 {
			t.Fatalf("%v, %v", list, err)
		}
		if c = list.Msg.GetCommands()[0]; !c.GetRunning() {
			break
		}
	}
	if c.GetId() != started.GetCommandId() || c.GetExitCode() != 4 || !c.GetDetached() || c.GetAttached() {
		t.Errorf("listed %v", c)
	}
	r := finish(t, attach(t, m, c.GetId(), false))
	n := uint64(len(r.stdout))
	if !strings.HasSuffix(r.stdout, "END\n") || n > 1<<20 || n < 1<<19 || r.exit.GetDroppedBytes() == 0 || r.exit.GetCode() != 4 {
		t.Errorf("got %d bytes, %v", n, r.exit)
	}
	list, err := m.ListCommands(testCtx(t), connect.NewRequest(&agentv1.ListCommandsRequest{}))
	if err != nil || len(list.Msg.GetCommands()) != 0 {
		t.Errorf("%v, %v", list, err)
	}
}
