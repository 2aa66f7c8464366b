package proxy

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/accesslog"
)

// keepAlive opens a connection, asks for app.localhost once, and keeps it.
func keepAlive(t testing.TB, f *fixture) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", f.proxy.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if got := again(c); got != "200 OK" {
		t.Fatalf("first request: %s", got)
	}
	return c
}

// again sends a request over a kept connection.
func again(c net.Conn) string {
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.localhost\r\n\r\n"); err != nil {
		return err.Error()
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err.Error()
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return resp.Status
}

func TestAThousandIdleClients(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), serveHTTP(t, say("hello")))
	memory := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	before := memory()
	conns := make([]net.Conn, 1000)
	for i := range conns {
		conns[i] = keepAlive(t, f)
	}
	each := (int64(memory()) - int64(before)) / int64(len(conns))
	t.Logf("%d bytes for each idle connection, with the client's end", each)
	if each > 64<<10 {
		t.Errorf("an idle connection takes %d bytes", each)
	}
	began := time.Now()
	keepAlive(t, f)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("a new client waited %s", took)
	}
	for i, c := range conns {
		if got := again(c); got != "200 OK" {
			t.Fatalf("idle connection %d: %s", i, got)
		}
	}
}

// TestAnIdleClientMakesPlace: which one is idle longest is package crowd's to tell.
func TestAnIdleClientMakesPlace(t *testing.T) {
	f := start(t, func(c *Config) { c.maxClients = 10 })
	f.publish("app.localhost", web(), serveHTTP(t, say("hello")))
	first := keepAlive(t, f)
	gone := make(chan error, 1)
	go func() {
		_, err := first.Read(make([]byte, 1))
		gone <- err
	}()
	for range 1000 {
		keepAlive(t, f) // is served
		select {
		case err := <-gone:
			if err == nil {
				t.Error("a byte instead of the end")
			}
			return
		default:
		}
	}
	t.Error("the first of 1000 clients is there still")
}

func TestTooManyClients(t *testing.T) {
	f := start(t, func(c *Config) { c.maxClients = 3 })
	began, finish := make(chan struct{}, 3), make(chan struct{})
	f.publish("app.localhost", web(), serveHTTP(t, func(http.ResponseWriter, *http.Request) {
		began <- struct{}{}
		<-finish
	}))
	var busy sync.WaitGroup
	for range 3 {
		busy.Go(func() {
			if resp, _ := f.get(t, "GET", "app.localhost", "", nil); resp.StatusCode != 200 {
				t.Errorf("status %d", resp.StatusCode)
			}
		})
		<-began
	}
	resp, body := f.get(t, "GET", "app.localhost", "", nil)
	if resp.StatusCode != 503 || !strings.Contains(body, "3 connections to published routes are in use, which is the limit") || !resp.Close {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	close(finish)
	busy.Wait()
	f.client.CloseIdleConnections()
	if resp, _ := f.get(t, "GET", "app.localhost", "", nil); resp.StatusCode != 200 {
		t.Errorf("afterwards: %d", resp.StatusCode)
	}
}

func TestTooManyConnectionsIntoAMachine(t *testing.T) {
	f := start(t, func(c *Config) { c.maxPerMachine = 2 })
	began, finish := make(chan struct{}, 9), make(chan struct{})
	slow, other, idle := web(), web(), web()
	slow.Port, idle.Port = 1, 2
	other.MachineID, other.Machine = "00000000000000bb", "other"
	f.publish("app.localhost", slow, serveHTTP(t, func(http.ResponseWriter, *http.Request) {
		began <- struct{}{}
		<-finish
	}))
	f.publish("idle.localhost", idle, serveHTTP(t, say("idle")))
	f.publish("other.localhost", other, serveHTTP(t, say("other")))
	// One that only waits for the next request makes place.
	f.get(t, "GET", "idle.localhost", "", nil)
	var busy sync.WaitGroup
	for range 2 {
		busy.Go(func() { f.get(t, "GET", "app.localhost", "", nil) })
		<-began
	}
	resp, body := f.get(t, "GET", "idle.localhost", "", nil)
	if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" ||
		!strings.Contains(body, "port 2 of machine web, which has as many connections through its routes as it may") {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	if resp, body := f.get(t, "GET", "other.localhost", "", nil); resp.StatusCode != 200 || body != "other" {
		t.Errorf("another machine: %d %q", resp.StatusCode, body)
	}
	close(finish)
	busy.Wait()
	if resp, body := f.get(t, "GET", "idle.localhost", "", nil); resp.StatusCode != 200 || body != "idle" {
		t.Errorf("afterwards: %d %q", resp.StatusCode, body)
	}
}

func TestServerThatHangs(t *testing.T) {
	f := start(t, func(c *Config) { c.responseTimeout = 50 * time.Millisecond })
	f.publish("app.localhost", web(), serveTCP(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }))
	resp, body := f.get(t, "GET", "app.localhost", "", nil)
	if resp.StatusCode != 504 || !strings.Contains(body, "has not begun to answer in time") {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	// A body may take as long as it wants.
	f.publish("app.localhost", web(), "")
	slow := web()
	slow.Port = 1
	f.publish("app.localhost", slow, serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		select {
		case <-time.After(200 * time.Millisecond):
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, "late")
	}))
	if resp, body := f.get(t, "GET", "app.localhost", "", nil); resp.StatusCode != 200 || body != "late" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
}

func TestHugeHeadersOfAServer(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), rawServer(t, "HTTP/1.1 200 OK\r\nX-Big: "+strings.Repeat("x", 2<<20)+"\r\nContent-Length: 0\r\n\r\n"))
	if resp, body := f.get(t, "GET", "app.localhost", "", nil); resp.StatusCode != 502 {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	big := web()
	big.Port = 1
	f.publish("app.localhost", big, rawServer(t, "HTTP/1.1 200 OK\r\nX-Big: "+strings.Repeat("x", 200<<10)+"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"))
	if resp, _ := f.get(t, "GET", "app.localhost", "", nil); resp.StatusCode != 200 || len(resp.Header.Get("X-Big")) != 200<<10 {
		t.Errorf("%d, %d bytes", resp.StatusCode, len(resp.Header.Get("X-Big")))
	}
}

// logOf gives the log of a route once it has so many lines: a line is written
// when its request has ended, of which its client may know before.
func logOf(t *testing.T, l *accesslog.Log, host string, lines int) string {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		text := ""
		paths, err := l.Files(web().MachineID, host)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range paths {
			b, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			text += string(b)
		}
		if strings.Count(text, "\n") >= lines {
			return text
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited for %d lines: %q", lines, text)
		}
	}
}

func TestRequestsAreLogged(t *testing.T) {
	l := accesslog.New(t.TempDir())
	f := start(t, func(c *Config) { c.Visits = l })
	f.publish("app.localhost", web(), serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/cut":
			w.Header().Set("Content-Length", "1000")
			_, _ = io.WriteString(w, "half")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		case "/missing":
			http.NotFound(w, r)
		default:
			_, _ = io.WriteString(w, "hello")
		}
	}))
	dead := web()
	dead.Port = 1
	f.publish("dead.localhost", dead, "")
	for _, target := range []string{"/?token=secret", "/missing", "/cut", "/%1b[2J"} {
		req, _ := http.NewRequest("GET", "http://app.localhost"+target, nil)
		resp, err := f.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}
	if _, got := ask(t, h2c(t, f), "PUT", nil); got != "hello" {
		t.Fatalf("%q", got)
	}
	f.get(t, "GET", "dead.localhost", "", nil)
	text := logOf(t, l, "app.localhost", 5)
	for _, want := range []string{
		" GET /?... HTTP/1.1 200 5 ", " GET /missing HTTP/1.1 404 19 ", " GET /cut HTTP/1.1 200 4 ", "ms (cut off)\n",
		" GET /%1b[2J HTTP/1.1 200 5 ", " PUT /some/path?... HTTP/2.0 200 5 ", "Z 127.0.0.1:",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("lacks %q: %s", want, text)
		}
	}
	if strings.Contains(text, "secret") {
		t.Errorf("a query is in the log: %s", text)
	}
	if text := logOf(t, l, "dead.localhost", 1); !strings.Contains(text, " 502 ") || !strings.Contains(text, "(Nothing answers on this port)") {
		t.Errorf("%s", text)
	}
}

func TestAnUpgradedConnectionIsLoggedAtItsEnd(t *testing.T) {
	l := accesslog.New(t.TempDir())
	f := start(t, func(c *Config) { c.Visits = l })
	f.publish("app.localhost", web(), serveTCP(t, shout))
	c, in := upgrade(t, f)
	_, _ = io.WriteString(c, "hey\n")
	if got, err := in.ReadString('\n'); err != nil || got != "HEY\n" {
		t.Fatalf("%q, %v", got, err)
	}
	_ = c.CloseWrite()
	_, _ = io.ReadAll(in)
	_ = c.Close()
	if text := logOf(t, l, "app.localhost", 1); !strings.Contains(text, " GET / HTTP/1.1 101 8 ") {
		t.Errorf("%s", text)
	}
}
