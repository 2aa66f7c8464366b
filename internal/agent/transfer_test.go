//go:build linux

package agent_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/tarstream"
)

func upload(t *testing.T, m *machine, archive []byte, to string, rename bool) error {
	t.Helper()
	st := m.Upload(testCtx(t))
	if err := st.Send(&agentv1.UploadRequest{Message: &agentv1.UploadRequest_Start{
		Start: &agentv1.UploadStart{Path: to, Rename: rename},
	}}); err != nil {
		t.Fatal(err)
	}
	for len(archive) > 0 {
		n := min(len(archive), 100_000)
		if err := st.Send(&agentv1.UploadRequest{Message: &agentv1.UploadRequest_Data{Data: archive[:n]}}); err != nil {
			break // CloseAndReceive tells
		}
		archive = archive[n:]
	}
	_, err := st.CloseAndReceive()
	return err
}

func download(t *testing.T, m *machine, path string) ([]byte, error) {
	t.Helper()
	st, err := m.Download(testCtx(t), connect.NewRequest(&agentv1.DownloadRequest{Path: path}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var b bytes.Buffer
	for st.Receive() {
		b.Write(st.Msg().GetData())
	}
	return b.Bytes(), st.Err()
}

func TestCopyInAndOut(t *testing.T) {
	m := configured(t)
	src := filepath.Join(t.TempDir(), "app")
	content := strings.Repeat("holdpoint\n", 300_000)
	if err := os.MkdirAll(src, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(src+"/big", []byte(content), 0o640); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := tarstream.Pack(context.Background(), &b, src); err != nil {
		t.Fatal(err)
	}
	for to, want := range map[string]string{"/srv": "srv/big", "rel": "rel/big", "/slash/": "slash/big"} {
		if err := upload(t, m, b.Bytes(), to, true); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(m.world, want)); err != nil || string(got) != content {
			t.Errorf("%s: %d bytes, %v", want, len(got), err)
		}
	}
	if err := upload(t, m, b.Bytes(), "/below", false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(m.world, "below/app/big")); err != nil {
		t.Error(err)
	}
	a, err := download(t, m, "/srv/.")
	if err != nil {
		t.Fatal(err)
	}
	back := t.TempDir()
	if _, err := tarstream.UnpackAs(context.Background(), bytes.NewReader(a), back, tarstream.Options{}); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(back + "/big"); err != nil || string(got) != content {
		t.Errorf("back: %d bytes, %v", len(got), err)
	}
	_, err = download(t, m, "/missing")
	wantKind(t, err, errdefs.NotFound)
	wantKind(t, upload(t, m, b.Bytes(), "/missing/x/y", true), errdefs.NotFound)
	wantKind(t, upload(t, m, []byte("no archive"), "/x", true), errdefs.Invalid)
	wantKind(t, upload(t, m, b.Bytes(), "", true), errdefs.Invalid)
	if _, err := os.Stat(filepath.Join(m.world, "../escape")); err == nil {
		t.Error("escaped")
	}
}

func dial(t *testing.T, m *machine, port int) *connect.BidiStreamForClient[agentv1.DialRequest, agentv1.DialResponse] {
	t.Helper()
	d := m.Dial(testCtx(t))
	if err := d.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_Port{Port: uint32(port)}}); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDial(t *testing.T) {
	for _, host := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(host, func(t *testing.T) {
			l, err := net.Listen("tcp", host)
			if err != nil {
				t.Skip(err)
			}
			defer l.Close()
			go func() { // answers with what was said, after the half close
				c, err := l.Accept()
				if err != nil {
					return
				}
				b, _ := io.ReadAll(c)
				_, _ = c.Write(append([]byte("said "), b...))
				_ = c.Close()
			}()
			m := configured(t)
			d := dial(t, m, l.Addr().(*net.TCPAddr).Port)
			if r, err := d.Receive(); err != nil || r.GetConnected() == nil {
				t.Fatalf("%v, %v", r, err)
			}
			say := strings.Repeat("x", 3_000_000)
			for rest := say; rest != ""; rest = rest[min(len(rest), 200_000):] {
				if err := d.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_Data{Data: []byte(rest[:min(len(rest), 200_000)])}}); err != nil {
					t.Fatal(err)
				}
			}
			if err := d.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_End{End: &agentv1.DialEnd{}}}); err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			for {
				r, err := d.Receive()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				got.Write(r.GetData())
			}
			if got.String() != "said "+say {
				t.Errorf("got %d bytes", got.Len())
			}
			_ = d.CloseRequest()
			_ = d.CloseResponse()
		})
	}
}

// TestDialPortThatEndsFirst: where half closes were asked for, the port still
// hears what is said after its own end.
func TestDialPortThatEndsFirst(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	heard := make(chan string, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "first")
		_ = c.(*net.TCPConn).CloseWrite()
		b, _ := io.ReadAll(c)
		heard <- string(b)
	}()
	m := configured(t)
	d := m.Dial(testCtx(t))
	port := uint32(l.Addr().(*net.TCPAddr).Port)
	if err := d.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_Port{Port: port}, HalfClose: true}); err != nil {
		t.Fatal(err)
	}
	said := ""
	for {
		r, err := d.Receive()
		if err != nil {
			t.Fatal(err)
		}
		said += string(r.GetData())
		if r.GetEnd() != nil {
			break
		}
	}
	for _, r := range []*agentv1.DialRequest{
		{Message: &agentv1.DialRequest_Data{Data: []byte("after")}},
		{Message: &agentv1.DialRequest_End{End: &agentv1.DialEnd{}}},
	} {
		if err := d.Send(r); err != nil {
			t.Fatal(err)
		}
	}
	if got := <-heard; got != "after" || said != "first" {
		t.Errorf("heard %q, said %q", got, said)
	}
	if _, err := d.Receive(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream goes on: %v", err)
	}
	_ = d.CloseRequest()
	_ = d.CloseResponse()
}

func TestDialErrors(t *testing.T) {
	m := configured(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := l.Addr().(*net.TCPAddr).Port
	_ = l.Close()
	for port, kind := range map[int]errdefs.Kind{free: errdefs.NotFound, 0: errdefs.Invalid, 70000: errdefs.Invalid} {
		d := dial(t, m, port)
		_, err := d.Receive()
		wantKind(t, err, kind)
		_ = d.CloseRequest()
		_ = d.CloseResponse()
	}
}

func TestDialReset(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	m := configured(t)
	d := dial(t, m, l.Addr().(*net.TCPAddr).Port)
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = c.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
	for {
		if _, err = d.Receive(); err != nil {
			break
		}
	}
	if errors.Is(err, io.EOF) {
		t.Error("a reset looks like an end")
	}
	_ = d.CloseRequest()
	_ = d.CloseResponse()
}

// TestFacts sees the commands' processes and ports, not the host's.
func TestFacts(t *testing.T) {
	if _, err := os.Stat("/usr/bin/python3"); err != nil {
		t.Skip("python3 is not installed")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // the test's own, not the machine's
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	m := configured(t)
	st := start(t, m, &agentv1.ExecStart{Argv: []string{"/usr/bin/python3", "-c", `
import socket, sys
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
print(s.getsockname()[1], flush=True)
sys.stdin.read()`}})
	out, started := until(t, st, "\n")
	f, err := m.Facts(testCtx(t), connect.NewRequest(&agentv1.FactsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	ls := f.Msg.GetListeners()
	if len(ls) != 1 || ls[0].GetAddress() != "127.0.0.1" || !strings.HasPrefix(ls[0].GetProcess(), "python3") {
		t.Errorf("listeners: %v, the port is %s", ls, out)
	}
	ps := f.Msg.GetProcesses()
	if len(ps) != 1 || ps[0].GetPid() != started.GetPid() || !strings.Contains(ps[0].GetCmdline(), "-c import socket") && !strings.Contains(ps[0].GetCmdline(), "import socket") {
		t.Errorf("processes: %v", ps)
	}
	_ = st.CloseRequest()
	finish(t, st)
}

func TestShutdown(t *testing.T) {
	m := configured(t)
	nice := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", `trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done`}})
	until(t, nice, "up\n")
	deaf := start(t, m, &agentv1.ExecStart{Argv: []string{"sh", "-c", `trap '' TERM HUP; echo up; while :; do sleep 0.01; done`}})
	until(t, deaf, "up\n")
	results := make(chan result, 2)
	for _, st := range []*stream{nice, deaf} {
		go func() { r, _ := readAll(st); results <- r }()
	}
	if _, err := m.Shutdown(testCtx(t), connect.NewRequest(&agentv1.ShutdownRequest{GraceMillis: 300})); err != nil {
		t.Fatal(err)
	}
	<-m.off
	for range 2 {
		if r := <-results; r.exit.GetCode() != 0 && r.exit.GetCode() != 137 || r.exit.GetCode() == 0 && r.stdout != "bye\n" {
			t.Errorf("got %+v", r)
		}
	}
	_, err := readAll(start(t, m, &agentv1.ExecStart{Argv: []string{"true"}}))
	wantKind(t, err, errdefs.WrongState)
}

func TestParseCmdline(t *testing.T) {
	const hexMagic = "00112233445566778899aabbccddeeff"
	p, err := agent.ParseCmdline("quiet holdpoint.magic=" + hexMagic + " console=ttyS0\n")
	if err != nil || p.Magic.String() != hexMagic || p.Root != "/dev/vda" {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err = agent.ParseCmdline("holdpoint.root=/dev/vdb holdpoint.magic=" + hexMagic); err != nil || p.Root != "/dev/vdb" {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err = agent.ParseCmdline("holdpoint.init=system holdpoint.magic=" + hexMagic); err != nil || !p.System {
		t.Errorf("%+v, %v", p, err)
	}
	for _, bad := range []string{"", "holdpoint.init=other holdpoint.magic=" + hexMagic, "holdpoint.magic=", "holdpoint.magic=12", "holdpoint.root=vda holdpoint.magic=" + hexMagic} {
		if _, err := agent.ParseCmdline(bad); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
