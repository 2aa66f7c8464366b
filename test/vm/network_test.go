package vm_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/test/session"
)

// TestNetwork has machines in a world that consists of a host with two addresses and
// a server outside, behind a cable, that has all names.
func TestNetwork(t *testing.T) {
	prepared(t)
	if session.InOwnNetwork(t, 10*time.Minute) {
		networkOf(t)
	}
}

func networkOf(t *testing.T) {
	world(t)
	s := newAlive(t).Session
	s.Must(t, "run", "web", "--image", "debian", "--memory", "256M", "--allow-host", "5432")
	curl := func(machine, url string, want string) {
		t.Helper()
		began := time.Now()
		r, err := s.Run("exec", machine, "--", "sh", "-c", "curl -sS -g -m 60 "+url+" || echo exit $?")
		if err != nil || strings.TrimSpace(r.Stdout) != want {
			t.Errorf("%s: %s in %v: %q, %v, want %q; %s", machine, url, time.Since(began), r.Stdout, err, want, r.Stderr)
		}
	}
	const refused, unresolved = "exit 7", "exit 6"
	curl("web", "http://good.example/", "outside")
	curl("web", "http://9.9.9.9/", "outside")
	curl("web", "http://[2a00::9]/", "outside")
	curl("web", "http://good.example/large | sha256sum | cut -c-16", large())
	curl("web", "-T /usr/bin/python3 http://good.example/count | cmp - /dev/fd/3 3<<E && echo same\n$(stat -L -c %s /usr/bin/python3)\nE\n", "same")
	curl("web", "http://host.holdpoint.internal:5432/", "host")
	for _, url := range []string{"9.9.9.1:7070", "192.168.77.1:7070", "192.168.77.9", "169.254.169.254", "198.18.0.1:7070", "[fd00:77::9]"} {
		curl("web", "http://"+url+"/", refused)
	}
	curl("web", "http://rebound.example/", unresolved)
	var log struct {
		Refused  uint64
		Refusals []struct{ Protocol, To, Reason string }
	}
	s.JSON(t, &log, "logs", "web", "--network")
	if log.Refused < 7 || !strings.Contains(fmt.Sprint(log.Refusals), "{tcp 192.168.77.9:80 private}") || !strings.Contains(fmt.Sprint(log.Refusals), "{dns rebound.example name of a refused address (") {
		t.Errorf("%+v", log)
	}
	if out := s.Must(t, "inspect", "web"); !strings.Contains(out, "internet") || !strings.Contains(out, "holdpoint logs web --network") {
		t.Error(out)
	}
	many(t, s)
	goesOn(t, s, curl)
}

// many has a guest hold connections, and learn why others are not made.
func many(t *testing.T, s *session.Session) {
	t.Helper()
	const program = `
import errno, socket
held = [socket.create_connection(("9.9.9.9", 7)) for i in range(200)]
for i, c in enumerate(held): c.sendall(b"%d" % i)
print(sum(c.recv(9) == b"%d" % i for i, c in enumerate(held)))
for to in ("9.9.9.9", 12), ("9.8.8.8", 80), ("9.7.7.7", 80), ("2a00:0:0:8::8", 80):
    try: print(socket.create_connection(to))
    except OSError as e: print(errno.errorcode[e.errno])
`
	out := s.Must(t, "exec", "web", "--", "python3", "-c", program)
	if want := "200 ECONNREFUSED EHOSTUNREACH EHOSTUNREACH EHOSTUNREACH"; strings.Join(strings.Fields(out), " ") != want {
		t.Errorf("%s, want %s", out, want)
	}
}

// client is a program that holds a connection to the outside, on which it waits
// for a word that does not come, and makes another one when that has ended; it listens,
// too, and has a connection within the guest. It counts and tells what ended.
const client = `
import os, socket, threading, time
l = socket.create_server(("0.0.0.0", 9000))
inner = socket.create_connection(("127.0.0.1", 9000)); peer, _ = l.accept()
def greet():
    while True:
        c, _ = l.accept(); c.sendall(b"listens"); c.close()
threading.Thread(target=greet, daemon=True).start()
def tell(name, text):
    open("/root/new", "w").write(text); os.rename("/root/new", "/root/" + name)
n = 0
while True:
    try:
        s = socket.create_connection(("9.9.9.9", 7), 10); s.settimeout(None)
        s.sendall(b"x"); s.recv(1); tell("up", str(n)); s.recv(1); why = "closed"
    except OSError as e: why = str(e.errno)
    n += 1
    inner.sendall(b"i"); assert peer.recv(1) == b"i"
    tell("ended", f"{n} {why}"); time.sleep(0.05)
`

// connected is the client in a machine.
type connected struct {
	*session.Session
	t       *testing.T
	machine string
}

// awaitUp waits until it holds a connection for the n-th time.
func (c connected) awaitUp(n int) {
	c.t.Helper()
	until(c.t, func() bool {
		r, err := c.Run("exec", c.machine, "--", "cat", "/root/up")
		return err == nil && strings.TrimSpace(r.Stdout) == strconv.Itoa(n)
	})
}

// hasEnded: the connection it held has ended as one that was aborted does, without its
// doing anything; it goes on, and so do its other sockets.
func (c connected) hasEnded(n int) {
	c.t.Helper()
	until(c.t, func() bool {
		r, err := c.Run("exec", c.machine, "--", "cat", "/root/ended")
		return err == nil && strings.TrimSpace(r.Stdout) == fmt.Sprintf("%d 103", n) // ECONNABORTED
	})
	if out := c.Must(c.t, "exec", c.machine, "--", "python3", "-c", "import socket; print(socket.create_connection(('127.0.0.1', 9000)).recv(9))"); !strings.Contains(out, "listens") {
		c.t.Errorf("%s: %s", c.machine, out)
	}
	c.awaitUp(n)
}

// goesOn follows the network, and what is connected, through whatever happens to a machine.
func goesOn(t *testing.T, s *session.Session, curl func(machine, url, want string)) {
	t.Helper()
	s.Must(t, "exec", "web", "--detach", "--", "python3", "-c", client)
	web := connected{s, t, "web"}
	web.awaitUp(0)
	if err := s.Kill(session.Monitor); err != nil {
		t.Fatal(err)
	}
	web.hasEnded(1)
	s.Must(t, "checkpoint", "create", "web", "--name", "there")
	var done struct {
		Closed int `json:"closed_sockets"`
		Notes  []string
	}
	s.JSON(t, &done, "restore", "web", "there", "--full", "--yes", "--no-safety")
	if done.Closed != 1 {
		t.Errorf("the restore closed %d connections to the outside", done.Closed)
	}
	web.hasEnded(2)
	curl("web", "http://192.168.77.9/", "exit 7")
	s.Must(t, "checkpoint", "pool", "there", "1")
	s.JSON(t, &done, "fork", "there", "--count", "2", "--name", "copy")
	for _, name := range []string{"copy-1", "copy-2"} {
		if !strings.Contains(strings.Join(done.Notes, "\n"), name+": 1 connections to the outside") {
			t.Errorf("%s: %q", name, done.Notes)
		}
		connected{s, t, name}.hasEnded(2)
		curl(name, "http://good.example/", "outside")
		curl(name, "http://192.168.77.9/", "exit 7")
		s.Must(t, "rm", "--force", name)
	}
	s.Must(t, "checkpoint", "pool", "there", "0")
	s.Must(t, "suspend", "web")
	s.JSON(t, &done, "resume", "web")
	if !strings.Contains(strings.Join(done.Notes, "\n"), "web: 1 connections to the outside") {
		t.Errorf("%q", done.Notes)
	}
	web.hasEnded(3)
	s.Must(t, "stop", "web")
	s.Must(t, "start", "web")
	curl("web", "http://good.example/", "outside")
	s.Must(t, "run", "list", "--image", "debian", "--memory", "256M", "--network", "open", "--allow", "good.example:80", "--allow", "192.168.77.9")
	curl("list", "http://good.example/", "outside")
	curl("list", "http://192.168.77.9/", "outside")
	curl("list", "http://other.example/", "exit 6")
	curl("list", "http://9.9.9.10/", "exit 7")
	s.Must(t, "run", "alone", "--image", "debian", "--memory", "256M", "--network", "none")
	if out := s.Must(t, "exec", "alone", "--", "sh", "-c", "ls /sys/class/net"); strings.TrimSpace(out) != "lo" {
		t.Errorf("a machine without a network has %q", out)
	}
	for _, m := range []string{"web", "list", "alone"} {
		s.Must(t, "rm", "--force", m)
	}
}

// until asks until it is so; each question takes its time.
func until(t *testing.T, so func() bool) {
	t.Helper()
	for began := time.Now(); !so(); {
		if time.Since(began) > 2*time.Minute {
			t.Fatal("it does not come")
		}
	}
}

// world makes the host's devices and the outside.
func world(t *testing.T) {
	t.Helper()
	ip := func(args string) {
		t.Helper()
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", args, err, out)
		}
	}
	ip("link set lo up")
	ip("link add cable type veth peer name far")
	tid := make(chan int)
	plugged, done := make(chan struct{}), make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine, the sockets keep the namespace
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		tid <- unix.Gettid()
		<-plugged
		for _, args := range []string{
			"link set lo up", "link set far up", "addr add 9.9.9.9/24 dev far", "addr add 9.9.9.10/24 dev far", "addr add 192.168.77.9/24 dev far",
			"addr add 169.254.169.254/32 dev far", "addr add 2a00::9/64 dev far nodad", "addr add fd00:77::9/64 dev far nodad",
		} {
			if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				done <- fmt.Errorf("ip %s: %w: %s", args, err, out)
				return
			}
		}
		done <- serveOutside()
	}()
	select {
	case err := <-done:
		t.Fatal(err)
	case id := <-tid:
		ip(fmt.Sprintf("link set far netns %d", id))
	}
	for _, args := range []string{
		"link set cable up", "addr add 9.9.9.1/24 dev cable", "addr add 192.168.77.1/24 dev cable", "addr add 2a00::1/64 dev cable nodad",
		"addr add fd00:77::1/64 dev cable nodad", "route add default via 9.9.9.9", "route add unreachable 9.8.8.0/24",
		"route add prohibit 9.7.7.0/24", "-6 route add unreachable 2a00:0:0:8::/64",
	} {
		ip(args)
	}
	close(plugged)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(conf, []byte("nameserver 9.9.9.9\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(conf, "/etc/resolv.conf", "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{"127.0.0.1:5432", ":7070"} {
		if err := serveHTTP(at, "host"); err != nil {
			t.Fatal(err)
		}
	}
}

// serveHTTP serves as long as the process lives.
func serveHTTP(at, name string) error {
	l, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, name) })
	mux.HandleFunc("/large", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(largeBody()) })
	mux.HandleFunc("/count", func(w http.ResponseWriter, r *http.Request) {
		n, _ := new(bytes.Buffer).ReadFrom(r.Body)
		fmt.Fprintln(w, n)
	})
	go func() { _ = http.Serve(l, mux) }()
	return nil
}

func serveOutside() error {
	if err := errors.Join(serveHTTP(":80", "outside"), serveEcho(":7")); err != nil {
		return err
	}
	c, err := net.ListenPacket("udp", "9.9.9.9:53")
	if err != nil {
		return err
	}
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			if b := resolve(buf[:n]); b != nil {
				_, _ = c.WriteTo(b, from)
			}
		}
	}()
	return nil
}

func serveEcho(at string) error {
	l, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	return nil
}

// resolve answers with 9.9.9.9 for each name, and with what it must not be for one.
func resolve(query []byte) []byte {
	var m dnsmessage.Message
	if m.Unpack(query) != nil || len(m.Questions) != 1 {
		return nil
	}
	q := m.Questions[0]
	m.Response, m.Additionals = true, nil
	if q.Type == dnsmessage.TypeA {
		addrs := []string{"9.9.9.9"}
		if strings.HasPrefix(q.Name.String(), "rebound.") {
			addrs = []string{"127.0.0.1", "192.168.77.9", "9.9.9.1"}
		}
		for _, a := range addrs {
			m.Answers = append(m.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 1},
				Body:   &dnsmessage.AResource{A: netip.MustParseAddr(a).As4()},
			})
		}
	}
	b, err := m.Pack()
	if err != nil {
		return nil
	}
	return b
}

// largeBody is what /large sends.
func largeBody() []byte { return bytes.Repeat([]byte("holdpoint network test\n"), 1<<19) }

// large is the beginning of its digest.
func large() string {
	return fmt.Sprintf("%x", sha256.Sum256(largeBody()))[:16]
}
