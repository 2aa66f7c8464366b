package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const greeting = `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "x"}, "capabilities": ["oob"]}}` + "\r\n"

// request is what the fake server reads.
type request struct {
	Execute   string         `json:"execute"`
	Arguments map[string]any `json:"arguments"`
	ID        string         `json:"id"`
}

// server is the fake peer of one connection.
type server struct {
	t    *testing.T
	conn *net.UnixConn
	r    *bufio.Reader
}

func (s *server) send(format string, args ...any) {
	if _, err := fmt.Fprintf(s.conn, format+"\r\n", args...); err != nil {
		s.t.Error(err)
	}
}

func (s *server) next() (request, bool) {
	line, err := s.r.ReadBytes('\n')
	if err != nil {
		return request{}, false
	}
	var q request
	if err := json.Unmarshal(line, &q); err != nil {
		s.t.Errorf("server read %q: %v", line, err)
	}
	return q, true
}

func (s *server) handshake() {
	_, _ = s.conn.Write([]byte(greeting))
	if q, ok := s.next(); ok && q.Execute == "qmp_capabilities" {
		s.send(`{"return": {}, "id": %q}`, q.ID)
	}
}

func pair(t *testing.T) (client, peer *net.UnixConn) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
	}
	return conns[0], conns[1]
}

// start runs serve as the peer of a new client.
func start(t *testing.T, serve func(*server), subs ...*Subscription) *Client {
	t.Helper()
	mine, peer := pair(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer peer.Close()
		s := &server{t: t, conn: peer, r: bufio.NewReader(peer)}
		s.handshake()
		serve(s)
	})
	c, err := Connect(ctxOf(t), mine, subs...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); peer.Close(); wg.Wait() })
	return c
}

func ctxOf(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func echo(s *server) {
	for q, ok := s.next(); ok; q, ok = s.next() {
		s.send(`{"return": {"name": %q, "n": %v}, "id": %q}`, q.Execute, q.Arguments["n"], q.ID)
	}
}

func TestConcurrentCallersGetTheirOwnAnswers(t *testing.T) {
	c := start(t, func(s *server) { // answers in reverse, in groups
		for {
			var group []request
			for range 4 {
				q, ok := s.next()
				if !ok {
					return
				}
				group = append(group, q)
			}
			for i := len(group) - 1; i >= 0; i-- {
				s.send(`{"return": %v, "id": %q}`, group[i].Arguments["n"], group[i].ID)
			}
		}
	})
	if v := c.Version(); v != (Version{7, 2, 22, "x"}) {
		t.Errorf("version %+v", v)
	}
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			var n int
			if err := c.Execute(ctxOf(t), "x", map[string]int{"n": i}, &n); err != nil || n != i {
				t.Errorf("call %d got %d, %v", i, n, err)
			}
		})
	}
	wg.Wait()
}

func TestRefusalIsTyped(t *testing.T) {
	c := start(t, func(s *server) {
		for q, ok := s.next(); ok; q, ok = s.next() {
			if q.Execute == "bad" {
				s.send(`{"id": %q, "error": {"class": "CommandNotFound", "desc": "no such"}}`, q.ID)
				continue
			}
			s.send(`{"return": 5, "id": %q}`, q.ID)
		}
	})
	err := c.Execute(ctxOf(t), "bad", nil, nil)
	var qe *Error
	if !errors.As(err, &qe) || qe.Class != "CommandNotFound" || err.Error() != "execute bad: no such" {
		t.Fatalf("error %v", err)
	}
	var a, b int
	err = c.Pipeline(ctxOf(t), Command{Name: "one", Result: &a}, Command{Name: "bad"}, Command{Name: "two", Result: &b})
	if !errors.As(err, &qe) || a != 5 || b != 5 {
		t.Fatalf("pipeline: %v, %d, %d", err, a, b)
	}
}

func TestPipelineIsOneWrite(t *testing.T) {
	got := make(chan int, 1)
	c := start(t, func(s *server) {
		buf := make([]byte, 1<<16)
		n, _ := s.conn.Read(buf)
		got <- strings.Count(string(buf[:n]), "\n")
		s.r = bufio.NewReader(strings.NewReader(string(buf[:n])))
		echo(s)
	})
	n := map[string]int{"n": 1}
	cmds := []Command{{Name: "stop", Args: n}, {Name: "save", Args: n}, {Name: "cont", Args: n}}
	if err := c.Pipeline(ctxOf(t), cmds...); err != nil {
		t.Error(err)
	}
	if n := <-got; n != 3 {
		t.Errorf("first read had %d commands, want 3", n)
	}
}

func TestCancelledCallLeavesTheClientGood(t *testing.T) {
	release := make(chan struct{})
	c := start(t, func(s *server) {
		slow, _ := s.next()
		<-release
		s.send(`{"return": 1, "id": %q}`, slow.ID)
		echo(s)
	})
	ctx, cancel := context.WithTimeout(ctxOf(t), 10*time.Millisecond)
	defer cancel()
	if err := c.Execute(ctx, "slow", nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("slow: %v", err)
	}
	close(release)
	var r struct{ N int }
	if err := c.Execute(ctxOf(t), "x", map[string]int{"n": 3}, &r); err != nil || r.N != 3 {
		t.Fatalf("after cancel: %v, %+v", err, r)
	}
}

func TestBlockedWriteObeysItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(ctxOf(t))
	stop := make(chan struct{})
	c := start(t, func(s *server) { // reads a little, and never again
		_, _ = s.r.ReadByte()
		cancel()
		<-stop
	})
	defer close(stop)
	err := c.Execute(ctx, "x", map[string]string{"s": strings.Repeat("a", 4<<20)}, nil)
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("blocked write: %v", err)
	}
	if c.Err() == nil {
		t.Error("half a command was written and the client goes on")
	}
}

func TestPeerGoneFailsCallersAndSubscribers(t *testing.T) {
	sub := NewSubscription()
	c := start(t, func(s *server) {
		s.next()
		s.send(`{"event": "SHUTDOWN", "data": {"reason": "guest-reset"}, "timestamp": {"seconds": 1, "microseconds": 2}}`)
		_, _ = s.conn.Write([]byte(`{"return": `)) // half a line, then gone
	}, sub)
	if err := c.Execute(ctxOf(t), "x", nil, nil); err == nil {
		t.Fatal("call survived its peer")
	}
	<-c.Done()
	e, err := sub.Next(ctxOf(t))
	if err != nil || e.Name != Shutdown || e.Time != time.Unix(1, 2000) {
		t.Fatalf("event %+v, %v", e, err)
	}
	if _, err := sub.Next(ctxOf(t)); err == nil {
		t.Fatal("subscription did not end")
	}
	if err := c.Execute(ctxOf(t), "y", nil, nil); err == nil {
		t.Fatal("call on a dead client")
	}
}

func TestNoVitalEventIsLostUnderAFlood(t *testing.T) {
	const rounds = 3000
	sub, narrow := NewSubscription(), NewSubscription(Stop)
	c := start(t, func(s *server) {
		q, _ := s.next()
		w := bufio.NewWriter(s.conn)
		for range rounds {
			fmt.Fprint(w, `{"event": "STOP"}`, "\n", `{"event": "RTC_CHANGE"}`, "\n", `{"event": "RESUME"}`, "\n")
		}
		_ = w.Flush()
		s.send(`{"return": {}, "id": %q}`, q.ID)
		echo(s)
	}, sub, narrow)
	if err := c.Execute(ctxOf(t), "go", nil, nil); err != nil { // nobody reads events, the reader still gets here
		t.Fatal(err)
	}
	c.Close()
	count := map[string]int{}
	last := ""
	for {
		e, err := sub.Next(ctxOf(t))
		if err != nil {
			break
		}
		count[e.Name]++
		if isVital(e) && e.Name == last {
			t.Fatal("order lost")
		}
		if isVital(e) {
			last = e.Name
		}
	}
	if count[Stop] != rounds || count[Resume] != rounds || count["RTC_CHANGE"] != maxOrdinary || sub.Dropped() != rounds-maxOrdinary {
		t.Errorf("counts %v, dropped %d", count, sub.Dropped())
	}
	n := 0
	for ; ; n++ {
		if _, err := narrow.Next(ctxOf(t)); err != nil {
			break
		}
	}
	if n != rounds {
		t.Errorf("narrow subscription saw %d of %d", n, rounds)
	}
}

func TestFilesArrive(t *testing.T) {
	names := make(chan string, 2)
	c := start(t, func(s *server) {
		buf, oob := make([]byte, 4096), make([]byte, 256)
		for range 2 {
			n, on, _, _, err := s.conn.ReadMsgUnix(buf, oob)
			if err != nil {
				return
			}
			msgs, _ := unix.ParseSocketControlMessage(oob[:on])
			var q request
			_ = json.Unmarshal(buf[:n], &q)
			if len(msgs) == 1 {
				fds, _ := unix.ParseUnixRights(&msgs[0])
				f := os.NewFile(uintptr(fds[0]), "got")
				text := make([]byte, 10)
				m, _ := f.ReadAt(text, 0)
				_ = f.Close()
				names <- q.Execute + " " + string(text[:m])
			}
			s.send(`{"return": {}, "id": %q}`, q.ID)
		}
	})
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := c.PassFile(ctxOf(t), "state", f); err != nil {
		t.Fatal(err)
	}
	if err := c.AddFile(ctxOf(t), 1, f); err != nil {
		t.Fatal(err)
	}
	if a, b := <-names, <-names; a != "getfd hello" || b != "add-fd hello" {
		t.Errorf("got %q, %q", a, b)
	}
}

func TestHandshakeFailures(t *testing.T) {
	for name, text := range map[string]string{
		"closed":      "",
		"not json":    "SSH-2.0\r\n",
		"two kinds":   `{"QMP": {}, "return": {}}` + "\n",
		"long line":   strings.Repeat("x", maxLine+100000),
		"only events": `{"event": "STOP"}` + "\n",
	} {
		t.Run(name, func(t *testing.T) {
			mine, peer := pair(t)
			var wg sync.WaitGroup
			wg.Go(func() { _, _ = peer.Write([]byte(text)); _ = peer.CloseWrite() })
			if _, err := Connect(ctxOf(t), mine); err == nil {
				t.Error("connected")
			}
			_ = peer.Close()
			wg.Wait()
		})
	}
	mine, peer := pair(t)
	defer peer.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if _, err := Connect(ctx, mine); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("silent peer: %v", err)
	}
}

func TestAnswersForAnEarlierClientAreDropped(t *testing.T) {
	c := start(t, func(s *server) {
		q, _ := s.next()
		s.send(`{"return": 7, "id": "deadbeef-2"}`)
		s.send(`{"error": {"class": "GenericError", "desc": "JSON parse error"}}`)
		s.send(`{"return": 1, "id": %q}`, q.ID)
		echo(s)
	})
	var n int
	if err := c.Execute(ctxOf(t), "x", nil, &n); err != nil || n != 1 {
		t.Fatalf("got %d, %v", n, err)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		greeting, `{"return": {}, "id": "a-1"}`, `{"return": [], "id": 3}`, `{"event": "STOP", "timestamp": {"seconds": -1}}`,
		`{"error": {"class": "x", "desc": "y"}}`, `{"id": null}`, strings.Repeat("[", 20000), `{"QMP": null}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := parse(line)
		if err != nil {
			return
		}
		_ = m.id()
		if m.Greeting == nil && m.Return == nil && m.Error == nil && m.Event == "" {
			t.Error("accepted nothing")
		}
	})
}
