package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestStreamsBothWays(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		in := bufio.NewReader(r.Body)
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			_, _ = io.WriteString(w, "echo "+line)
			_ = http.NewResponseController(w).Flush()
		}
	}))
	body, in := io.Pipe()
	req, _ := http.NewRequest("POST", "http://"+f.proxy.Addr()+"/", body)
	req.Host = "app.localhost"
	go func() { _, _ = io.WriteString(in, "line 0\n") }()
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	out := bufio.NewReader(resp.Body)
	for i := range 20 {
		// Each answer is read before the next line is sent.
		got, err := out.ReadString('\n')
		if want := fmt.Sprintf("echo line %d\n", i); err != nil || got != want {
			t.Fatalf("got %q, %v, want %q", got, err, want)
		}
		if _, err := fmt.Fprintf(in, "line %d\n", i+1); err != nil {
			t.Fatal(err)
		}
	}
	_ = in.Close()
	if rest, err := io.ReadAll(out); err != nil || string(rest) != "echo line 20\n" {
		t.Fatalf("rest %q, %v", rest, err)
	}
}

func TestServerSentEventsAndSlowKnownLengthArriveAtOnce(t *testing.T) {
	for _, length := range []string{"", "8"} {
		f := start(t)
		next := make(chan struct{})
		f.publish("app.localhost", web(), serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
			if length != "" {
				w.Header().Set("Content-Length", length)
			}
			for range 4 {
				_, _ = io.WriteString(w, "x\n")
				_ = http.NewResponseController(w).Flush()
				<-next
			}
		}))
		req, _ := http.NewRequest("GET", "http://"+f.proxy.Addr()+"/", nil)
		req.Host = "app.localhost"
		resp, err := f.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		out := bufio.NewReader(resp.Body)
		for range 4 {
			if got, err := out.ReadString('\n'); err != nil || got != "x\n" {
				t.Fatalf("%q, %v", got, err)
			}
			next <- struct{}{}
		}
		_ = resp.Body.Close()
	}
}

func TestLargeBodiesArriveWhole(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		_, _ = io.Copy(w, r.Body)
	}))
	const size = 24 << 20
	src := func() io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{1}), size) }
	want := sha256.New()
	_, _ = io.Copy(want, src())
	req, _ := http.NewRequest("POST", "http://"+f.proxy.Addr()+"/", src())
	req.Host = "app.localhost"
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	got := sha256.New()
	n, err := io.Copy(got, resp.Body)
	if err != nil || n != size || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Fatalf("%d bytes, %v", n, err)
	}
}

func TestWebSocket(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		for {
			kind, msg, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if err := c.Write(r.Context(), kind, append([]byte("re: "), msg...)); err != nil {
				return
			}
		}
	}))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, resp, err := websocket.Dial(ctx, "ws://app.localhost/socket", &websocket.DialOptions{HTTPClient: f.client})
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("status %d", resp.StatusCode)
	}
	for i := range 100 {
		msg := strings.Repeat("x", i*100)
		if err := c.Write(ctx, websocket.MessageText, []byte(msg)); err != nil {
			t.Fatal(err)
		}
		if _, got, err := c.Read(ctx); err != nil || string(got) != "re: "+msg {
			t.Fatalf("%q, %v", got, err)
		}
	}
	if err := c.Close(websocket.StatusNormalClosure, ""); err != nil {
		t.Fatal(err)
	}
}

// upgrade opens an upgraded connection of a made-up protocol.
func upgrade(t *testing.T, f *fixture) (*net.TCPConn, *bufio.Reader) {
	t.Helper()
	c, err := net.Dial("tcp", f.proxy.Addr())
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.localhost\r\nConnection: Upgrade\r\nUpgrade: shout\r\n\r\n")
	in := bufio.NewReader(c)
	resp, err := http.ReadResponse(in, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("upgrade: %v, %v", resp, err)
	}
	return c.(*net.TCPConn), in
}

// shout is a server of the made-up protocol: it answers in upper case, and
// says bye when the client has closed its side.
func shout(c net.Conn) {
	in := bufio.NewReader(c)
	if _, err := http.ReadRequest(in); err != nil {
		return
	}
	_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: shout\r\n\r\n")
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			break
		}
		_, _ = io.WriteString(c, strings.ToUpper(line))
	}
	_, _ = io.WriteString(c, "bye\n")
}

func TestHalfCloseOfAnUpgradedConnection(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveTCP(t, shout))
	c, in := upgrade(t, f)
	defer func() { _ = c.Close() }()
	_, _ = io.WriteString(c, "hey\n")
	if got, err := in.ReadString('\n'); err != nil || got != "HEY\n" {
		t.Fatalf("%q, %v", got, err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(in); err != nil || string(rest) != "bye\n" {
		t.Fatalf("after half close: %q, %v", rest, err)
	}
}

func TestClientThatLeavesEndsTheRequestInTheMachine(t *testing.T) {
	f := start(t)
	began, ended := make(chan struct{}), make(chan struct{})
	f.publish("app.localhost", web(), serveHTTP(t, func(_ http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
		close(ended)
	}))
	ctx, cancel := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, "GET", "http://"+f.proxy.Addr()+"/", nil)
	req.Host = "app.localhost"
	failed := make(chan error)
	go func() {
		resp, err := f.client.Do(req)
		if err == nil {
			_ = resp.Body.Close()
		}
		failed <- err
	}()
	<-began
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	await(t, ended, "the request in the machine to end")
}

func await(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(10 * time.Second):
		t.Fatalf("waited 10 s for %s", what)
	}
}

func TestMachineThatDiesInTheMiddleIsNotACleanEnd(t *testing.T) {
	for name, head := range map[string]string{
		"length":  "Content-Length: 1000\r\n\r\nhalf of it",
		"chunked": "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t)
			f.publish("app.localhost", web(), serveTCP(t, func(c net.Conn) {
				_, _ = http.ReadRequest(bufio.NewReader(c))
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n"+head)
			}))
			req, _ := http.NewRequest("GET", "http://"+f.proxy.Addr()+"/", nil)
			req.Host = "app.localhost"
			resp, err := f.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = resp.Body.Close() }()
			if b, err := io.ReadAll(resp.Body); err == nil {
				t.Fatalf("a clean end after %q", b)
			}
		})
	}
}

func TestServerWithoutAnAnswer(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveTCP(t, func(c net.Conn) {
		_, _ = http.ReadRequest(bufio.NewReader(c))
	}))
	resp, body := f.get(t, "GET", "app.localhost", "", nil)
	if resp.StatusCode != 502 || !strings.Contains(body, "port 8080 of machine web took the request for app.localhost and ended without an HTTP answer") {
		t.Fatalf("%d %q", resp.StatusCode, body)
	}
}

func TestSlowHeadersEnd(t *testing.T) {
	f := start(t, func(c *Config) { c.headerTimeout = 50 * time.Millisecond })
	c, err := net.Dial("tcp", f.proxy.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.localhost\r\nX-Slow: ")
	if _, err := io.ReadAll(c); err != nil {
		t.Fatalf("the connection did not end: %v", err)
	}
}

func TestHeadersHaveALimit(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveHTTP(t, say("hello")))
	req, _ := http.NewRequest("GET", "http://"+f.proxy.Addr()+"/", nil)
	req.Host = "app.localhost"
	req.Header.Set("X-Big", strings.Repeat("x", maxHeaderBytes+8<<10))
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("status %d", resp.StatusCode)
	}
}

func TestExpectContinue(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/refuse" {
			w.WriteHeader(http.StatusExpectationFailed)
			return
		}
		_, _ = io.Copy(w, r.Body)
	}))
	c, err := net.Dial("tcp", f.proxy.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	in := bufio.NewReader(c)
	_, _ = io.WriteString(c, "POST / HTTP/1.1\r\nHost: app.localhost\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
	resp, err := http.ReadResponse(in, nil)
	if err != nil || resp.StatusCode != http.StatusContinue {
		t.Fatalf("%v, %v", resp, err)
	}
	_, _ = io.WriteString(c, "body")
	resp, err = http.ReadResponse(in, nil)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v, %v", resp, err)
	}
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "body" {
		t.Fatalf("%q, %v", b, err)
	}
	_, _ = io.WriteString(c, "POST /refuse HTTP/1.1\r\nHost: app.localhost\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
	resp, err = http.ReadResponse(in, nil)
	if err != nil || resp.StatusCode != http.StatusExpectationFailed {
		t.Fatalf("%v, %v", resp, err)
	}
}

func TestManyRequestsWithoutAnError(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		_, _ = w.Write(append([]byte(r.Method+" "), b...))
	}))
	const clients, requests = 32, 10_000
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for i := c; i < requests; i += clients {
				method, body, want := "GET", io.Reader(nil), "GET "
				if i%16 == c%16 && i%5 == 0 {
					method, body, want = "POST", strings.NewReader("data"), "POST data"
				}
				if resp, got := f.get(t, method, "app.localhost", "", body); resp.StatusCode != 200 || got != want {
					t.Errorf("request %d: %d %q", i, resp.StatusCode, got)
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestRouteMovesUnderKeepAlive is contract R1 and the generation rule: the
// same client connection follows the route, and no connection is used twice
// for different targets.
func TestRouteMovesUnderKeepAlive(t *testing.T) {
	f := start(t)
	first, restored, moved, other := web(), web(), web(), web()
	restored.Generation = 2
	moved.Generation, moved.Port = 2, 9090
	other.MachineID, other.Machine = "00000000000000bb", "other"
	for _, step := range []struct {
		target Target
		text   string
	}{{first, "first"}, {restored, "restored"}, {moved, "moved"}, {other, "other machine"}, {first, "first"}} {
		addr := ""
		if f.dialCount(step.target) == 0 {
			addr = serveHTTP(t, say(step.text))
		}
		f.publish("app.localhost", step.target, addr)
		for range 3 {
			if resp, got := f.get(t, "GET", "app.localhost", "", nil); resp.StatusCode != 200 || got != step.text {
				t.Fatalf("%+v: %d %q", step.target, resp.StatusCode, got)
			}
		}
	}
	for _, target := range []Target{first, restored, moved, other} {
		if n := f.dialCount(target); n != 1 {
			t.Errorf("%+v: %d connections, want one that is kept alive", target, n)
		}
	}
}

func TestRestoreBetweenLookupAndDial(t *testing.T) {
	f := start(t)
	old, restored := web(), web()
	restored.Generation = 2
	f.publish("app.localhost", old, "")
	f.fail(old, errdefs.New(errdefs.Conflict, "machine web was restored"))
	addr := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) })
	f.onDial = func(Target) { f.publish("app.localhost", restored, addr) }
	if resp, got := f.get(t, "POST", "app.localhost", "", strings.NewReader("payload")); resp.StatusCode != 200 || got != "payload" {
		t.Fatalf("%d %q", resp.StatusCode, got)
	}
	// A machine that is restored again and again ends in an answer, not a loop.
	f.publish("app.localhost", old, "")
	f.onDial = nil
	if resp, _ := f.get(t, "GET", "app.localhost", "", nil); resp.StatusCode != 502 {
		t.Fatalf("status %d", resp.StatusCode)
	}
}

// TestPostAfterTheServerClosedItsIdleConnection: what cannot be sent twice
// never goes over a connection that may be closing.
func TestPostAfterTheServerClosedItsIdleConnection(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveTCP(t, func(c net.Conn) {
		req, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		b, _ := io.ReadAll(req.Body)
		// Says nothing of closing, and closes.
		_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(b), b)
	}))
	for i := range 50 {
		if resp, _ := f.get(t, "GET", "app.localhost", "", nil); resp.StatusCode != 200 {
			t.Fatalf("GET %d: %d", i, resp.StatusCode)
		}
		if resp, got := f.get(t, "POST", "app.localhost", "", strings.NewReader("data")); resp.StatusCode != 200 || got != "data" {
			t.Fatalf("POST %d: %d %q", i, resp.StatusCode, got)
		}
	}
}

func TestCutEndsConnectionsOfATarget(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveTCP(t, shout))
	c, in := upgrade(t, f)
	defer func() { _ = c.Close() }()
	f.proxy.Cut(func(t Target) bool { return t.MachineID == "another" })
	_, _ = io.WriteString(c, "hey\n")
	if got, err := in.ReadString('\n'); err != nil || got != "HEY\n" {
		t.Fatalf("%q, %v", got, err)
	}
	f.proxy.Cut(func(t Target) bool { return t == web() })
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadAll(in); errors.Is(err, context.DeadlineExceeded) {
		t.Fatal("the connection goes on")
	} else if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		t.Fatal("the connection goes on")
	}
}

func TestCloseLetsRequestsEndAndCutsUpgraded(t *testing.T) {
	w := newWorld()
	p, err := Start(Config{Backend: w, Port: freePort(t)})
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{world: w, proxy: p, client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	began, finish := make(chan struct{}), make(chan struct{})
	f.publish("app.localhost", web(), serveTCP(t, shout))
	c, in := upgrade(t, f)
	defer func() { _ = c.Close() }()
	slow := web()
	slow.Port = 1
	f.publish("slow.localhost", slow, serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
		close(began)
		<-finish
		_, _ = io.WriteString(w, "done")
	}))
	got := make(chan string)
	go func() {
		_, body := f.get(t, "GET", "slow.localhost", "", nil)
		got <- body
	}()
	<-began
	closed := make(chan error)
	go func() { closed <- p.Close(t.Context()) }()
	if _, err := in.ReadString('\n'); err == nil {
		t.Error("the upgraded connection goes on")
	}
	close(finish)
	if body := <-got; body != "done" {
		t.Errorf("the request under way got %q", body)
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

func TestCloseEndsWhatDoesNotEnd(t *testing.T) {
	w := newWorld()
	p, err := Start(Config{Backend: w, Port: freePort(t)})
	if err != nil {
		t.Fatal(err)
	}
	began := make(chan struct{})
	w.publish("app.localhost", web(), serveHTTP(t, func(_ http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
	}))
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.localhost\r\n\r\n")
	<-began
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Close: %v", err)
	}
}
