package proxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/accesslog"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// tunnel publishes a TCP route to addr and gives its port of the host.
func tunnel(t *testing.T, f *fixture, target Target, addr string) int {
	t.Helper()
	port := freePort(t)
	f.publish(machine.TCPHost(port), target, addr)
	f.proxy.Settle(map[int]bool{port: true})
	if err := f.proxy.Problem(port); err != nil {
		t.Fatal(err)
	}
	return port
}

func connectTo(t *testing.T, port int) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", machine.TCPHost(port))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

func TestTunnelWithHalfCloses(t *testing.T) {
	l := accesslog.New(t.TempDir())
	f := start(t, func(c *Config) { c.Visits = l })
	said := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	heard := make(chan []byte, 1)
	for name, c := range map[string]struct {
		server func(net.Conn)
		client func(c *net.TCPConn) error
	}{
		"the client ends first": {
			func(c net.Conn) { // answers at the end only
				b, _ := io.ReadAll(c)
				_, _ = c.Write(b)
			},
			func(c *net.TCPConn) error {
				if _, err := c.Write(said); err != nil {
					return err
				}
				return c.CloseWrite()
			},
		},
		"the server ends first": {
			func(c net.Conn) {
				_, _ = c.Write(said)
				_ = c.(*net.TCPConn).CloseWrite()
				b, _ := io.ReadAll(c)
				heard <- b
			},
			func(*net.TCPConn) error { return nil },
		},
	} {
		t.Run(name, func(t *testing.T) {
			target := web()
			target.Port += len(name)
			port := tunnel(t, f, target, serveTCP(t, c.server))
			conn := connectTo(t, port)
			if err := c.client(conn); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(conn)
			if err != nil || !bytes.Equal(got, said) {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
			in := "in=1600000"
			if strings.HasPrefix(name, "the server") {
				if _, err := conn.Write([]byte("after your end")); err != nil {
					t.Fatal(err)
				}
				_ = conn.CloseWrite()
				if b := <-heard; string(b) != "after your end" {
					t.Errorf("the server heard %q", b)
				}
				in = "in=14"
			}
			if text := logOf(t, l, machine.TCPHost(port), 1); !strings.Contains(text, " TCP "+in+" out=1600000 ") || strings.Contains(text, "(") {
				t.Errorf("%s", text)
			}
		})
	}
}

// isReset reports whether a new connection is reset, be it at once.
func isReset(t *testing.T, port int) bool {
	t.Helper()
	c, err := net.Dial("tcp", machine.TCPHost(port))
	if err == nil {
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		_, err = io.ReadAll(c)
	}
	return errors.Is(err, syscall.ECONNRESET)
}

func TestTunnelThatBreaks(t *testing.T) {
	l := accesslog.New(t.TempDir())
	f := start(t, func(c *Config) { c.Visits = l })
	// Of the server.
	port := tunnel(t, f, web(), serveTCP(t, func(c net.Conn) {
		_ = c.(*net.TCPConn).SetLinger(0)
	}))
	if !isReset(t, port) {
		t.Error("a reset of the server is no reset for the client")
	}
	logOf(t, l, machine.TCPHost(port), 1)
	// Nothing listens.
	dead := web()
	dead.Port = 1
	port = tunnel(t, f, dead, "")
	if !isReset(t, port) {
		t.Error("no server is no reset for the client")
	}
	if text := logOf(t, l, machine.TCPHost(port), 1); !strings.Contains(text, "in=0 out=0") || !strings.Contains(text, "(Nothing answers on this port)") {
		t.Errorf("%s", text)
	}
}

func TestTunnelGoesWhereTheRouteLeads(t *testing.T) {
	f := start(t)
	hello := func(text string) string {
		return serveTCP(t, func(c net.Conn) {
			_, _ = io.WriteString(c, text+"\n")
			_, _ = io.Copy(io.Discard, c)
		})
	}
	first, restored := web(), web()
	restored.Generation = 2
	port := tunnel(t, f, first, hello("first"))
	host := machine.TCPHost(port)
	read := func(c net.Conn) string {
		b := make([]byte, 32)
		n, _ := c.Read(b)
		return strings.TrimSpace(string(b[:n]))
	}
	c := connectTo(t, port)
	if got := read(c); got != "first" {
		t.Fatalf("%q", got)
	}
	// Restored between look-up and connection.
	f.fail(first, errdefs.New(errdefs.Conflict, "machine web was restored"))
	addr := hello("restored")
	f.mu.Lock()
	f.onDial = func(Target) { f.publish(host, restored, addr) }
	f.mu.Unlock()
	if got := read(connectTo(t, port)); got != "restored" {
		t.Fatalf("%q", got)
	}
	f.proxy.Cut(func(t Target) bool { return t.Generation == 1 })
	if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection of the old generation: %v", err)
	}
	// Withdrawn.
	c = connectTo(t, port)
	read(c)
	f.proxy.Settle(map[int]bool{})
	if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection of a withdrawn route: %v", err)
	}
	if c, err := net.Dial("tcp", host); err == nil {
		_ = c.Close()
		t.Error("a withdrawn route is listened on")
	}
}

func TestPortThatIsTaken(t *testing.T) {
	f := start(t)
	other := listenTCP(t)
	port := portOf(other)
	if _, err := f.proxy.Reserve(port); !errdefs.Is(err, errdefs.Conflict) || !strings.Contains(err.Error(), "--listen") {
		t.Errorf("reserve: %v", err)
	}
	f.publish(machine.TCPHost(port), web(), serveTCP(t, func(c net.Conn) { _, _ = io.WriteString(c, "hello") }))
	f.proxy.Settle(map[int]bool{port: true})
	if err := f.proxy.Problem(port); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("problem: %v", err)
	}
	_ = other.Close()
	for deadline := time.Now().Add(20 * time.Second); f.proxy.Problem(port) != nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the port is free and not listened on")
		}
	}
	if got, err := io.ReadAll(connectTo(t, port)); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestReservedPortIsKept(t *testing.T) {
	f := start(t)
	port := freePort(t)
	release, err := f.proxy.Reserve(port)
	if err != nil {
		t.Fatal(err)
	}
	f.proxy.Settle(map[int]bool{})
	if _, err := f.proxy.Reserve(port); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("a second route: %v", err)
	}
	// No route leads there yet.
	if !isReset(t, port) {
		t.Error("no reset")
	}
	release()
	f.proxy.Settle(map[int]bool{})
	if c, err := net.Dial("tcp", machine.TCPHost(port)); err == nil {
		_ = c.Close()
		t.Error("a port that became no route is listened on")
	}
}

func TestTunnelsCountForTheirMachine(t *testing.T) {
	f := start(t, func(c *Config) { c.maxPerMachine = 1 })
	port := tunnel(t, f, web(), serveTCP(t, func(c net.Conn) {
		_, _ = io.WriteString(c, "x")
		_, _ = io.Copy(io.Discard, c)
	}))
	first := connectTo(t, port)
	if _, err := first.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if !isReset(t, port) {
		t.Error("one too many is carried")
	}
}

func TestCloseEndsTunnels(t *testing.T) {
	w := newWorld()
	p, err := Start(Config{Backend: w, Port: freePort(t)})
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{world: w, proxy: p}
	port := tunnel(t, f, web(), serveTCP(t, func(c net.Conn) {
		_, _ = io.WriteString(c, "x")
		_, _ = io.Copy(io.Discard, c)
	}))
	c := connectTo(t, port)
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(c); err == nil {
		t.Error("a clean end")
	}
}
