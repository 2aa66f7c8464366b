package vm_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/test/session"
)

// TestRoutes has a server of HTTP/2 and one of a protocol of its own in a guest.
func TestRoutes(t *testing.T) {
	s := newAlive(t).Session
	s.Must(t, "run", "web", "--image", "debian", "--memory", "256M")
	server := filepath.Join(t.TempDir(), "h2c")
	build := exec.Command("go", "build", "-o", server, "./testdata/h2c")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s.Must(t, "cp", server, "web:/root/h2c")
	s.Must(t, "exec", "web", "--detach", "--", "/root/h2c")
	s.Must(t, "exec", "web", "--detach", "--", "python3", "-c", echo)
	until(t, func() bool {
		r, err := s.Run("exec", "web", "--", "sh", "-c", "grep -q :1F90 /proc/net/tcp && grep -q :1538 /proc/net/tcp")
		return err == nil && r.Code == 0
	})
	http2Route(t, s)
	tcpRoute(t, s)
}

// echo answers in upper case when its client has ended its half; on port 5432.
const echo = `
import socket
server = socket.socket()
server.bind(("127.0.0.1", 5432))
server.listen()
while True:
    c, _ = server.accept()
    data = b""
    while True:
        piece = c.recv(65536)
        if not piece:
            break
        data += piece
    c.sendall(data.upper())
    c.close()
`

type exposed struct{ Routes []struct{ Host, URL string } }

// http2Route streams both ways, with trailers.
func http2Route(t *testing.T, s *session.Session) {
	var e exposed
	s.JSON(t, &e, "expose", "web", "8080")
	_, port, _ := net.SplitHostPort(strings.Trim(strings.TrimPrefix(e.Routes[0].URL, "http://"), "/"))
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", "127.0.0.1:"+port)
	}}
	defer transport.CloseIdleConnections()
	body, in := io.Pipe()
	defer in.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.Routes[0].URL, body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	buffer := make([]byte, 64)
	for _, word := range []string{"one", "two", "three"} {
		// Each answer is read before the next word is sent.
		if _, err := io.WriteString(in, word); err != nil {
			t.Fatal(err)
		}
		n, err := io.ReadAtLeast(resp.Body, buffer, len(word))
		if err != nil || string(buffer[:n]) != word {
			t.Fatalf("%q, %v", buffer[:n], err)
		}
	}
	_ = in.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	if resp.ProtoMajor != 2 || resp.Header.Get("X-Spoken") != "HTTP/2.0" || resp.Trailer.Get("X-Count") != "11" {
		t.Errorf("%s, %v, trailers %v", resp.Proto, resp.Header, resp.Trailer)
	}
}

// tcpRoute carries the end of one half by itself.
func tcpRoute(t *testing.T, s *session.Session) {
	var e exposed
	s.JSON(t, &e, "expose", "web", "5432", "--tcp")
	c, err := net.Dial("tcp", e.Routes[0].Host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	said := strings.Repeat("holdpoint ", 50_000)
	if _, err := io.WriteString(c, said); err != nil {
		t.Fatal(err)
	}
	_ = c.(*net.TCPConn).CloseWrite()
	if got, err := io.ReadAll(c); err != nil || string(got) != strings.ToUpper(said) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	until(t, func() bool {
		return strings.Contains(s.Must(t, "logs", "web", "--route", e.Routes[0].Host), "in=500000 out=500000")
	})
}
