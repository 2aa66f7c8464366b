package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"github.com/holdpoint/holdpoint/internal/network/host"
	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// zooHost is the real host, in a network namespace, and its name server.
type zooHost struct{ host.Host }

func (zooHost) Nameservers() []netip.AddrPort {
	return []netip.AddrPort{netip.MustParseAddrPort("9.9.9.9:53")}
}

// near and far are the host's devices and those of the outside, as the arguments of ip.
func near() []string {
	return []string{
		"link set lo up", "link set cable up", "addr add 9.9.9.1/24 dev cable", "addr add 192.168.77.1/24 dev cable",
		"addr add 2a00::1/64 dev cable nodad", "addr add fd00:77::1/64 dev cable nodad", "addr add 8.8.4.4/32 dev lo",
		"addr add 2600::20/128 dev lo nodad", "route add local 5.5.5.0/24 dev lo", "route add unreachable 9.8.8.0/24",
		"route add prohibit 9.7.7.0/24", "route add default via 9.9.9.9", "-6 route add default via 2a00::9",
	}
}

func far() []string {
	all := []string{"link set lo up", "link set far up", "addr add 9.9.9.9/24 dev far", "addr add 192.168.77.9/24 dev far", "addr add 2a00::9/64 dev far nodad", "addr add fd00:77::9/64 dev far nodad"}
	for _, a := range []string{"169.254.169.254", "168.63.129.16", "100.64.0.9", "10.1.2.3", "192.0.2.9", "198.18.0.9", "240.0.0.9", "8.8.8.8"} {
		all = append(all, "addr add "+a+"/32 dev lo")
	}
	for _, a := range []string{"fd00:ec2::254", "64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b::a9fe:a9fe", "2002:7f00:1::1", "2001:db8::9", "2606:4700::1111"} {
		all = append(all, "addr add "+a+"/128 dev lo nodad")
	}
	return all
}

// insideZoo tells a test that it runs in namespaces of its own.
const insideZoo = "HOLDPOINT_TEST_ZOO"

func ip(args string) error {
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", args, err, out)
	}
	return nil
}

// inZoo runs the calling test again, in a network namespace of its own with a cable to
// the outside, and reports whether it is that one. arrived counts the connections that
// came out there.
func inZoo(t *testing.T) (arrived *atomic.Int64, ok bool) {
	t.Helper()
	if os.Getenv(insideZoo) == "" {
		if os.Geteuid() != 0 {
			t.Skip("only root can have network namespaces here")
		}
		if _, err := exec.LookPath("ip"); err != nil {
			t.Skip("ip is not installed")
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=3m")
		cmd.Env = append(os.Environ(), insideZoo+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return nil, false
	}
	arrived = new(atomic.Int64)
	if err := errors.Join(ip("link add cable type veth peer name far"), plugIn(arrived)); err != nil {
		t.Fatal(err)
	}
	for _, args := range near() {
		if err := ip(args); err != nil {
			t.Fatal(err)
		}
	}
	return arrived, true
}

// plugIn makes the outside, in a namespace that lives as long as its sockets.
func plugIn(arrived *atomic.Int64) error {
	tid, plugged, done := make(chan int, 1), make(chan struct{}), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		tid <- unix.Gettid()
		<-plugged
		var err error
		for _, args := range far() {
			err = errors.Join(err, ip(args))
		}
		done <- errors.Join(err, animals(arrived))
	}()
	select {
	case err := <-done:
		return err
	case id := <-tid:
		err := ip(fmt.Sprintf("link set far netns %d", id))
		close(plugged)
		return errors.Join(err, <-done)
	}
}

// The ports of the animals. At closed nobody listens.
const (
	echoPort   = 7
	lastPort   = 8 // answers when it has heard all
	firstPort  = 9 // ends first, and then hears
	resetPort  = 10
	silentPort = 11
	closedPort = 12
	bigPort    = 13 // answers with a large datagram
	webPort    = 80
)

// animals are the servers outside; they live as long as the process.
func animals(arrived *atomic.Int64) error {
	serve := func(port int, f func(*net.TCPConn)) error {
		l, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				arrived.Add(1)
				go f(c.(*net.TCPConn))
			}
		}()
		return nil
	}
	datagrams := func(at string, f func([]byte) []byte) error {
		c, err := net.ListenPacket("udp", at)
		if err != nil {
			return err
		}
		go func() {
			buf := make([]byte, maxDatagram)
			for {
				n, from, err := c.ReadFrom(buf)
				if err != nil {
					return
				}
				if reply := f(buf[:n]); reply != nil {
					_, _ = c.WriteTo(reply, from)
				}
			}
		}()
		return nil
	}
	names := newZooNames()
	return errors.Join(
		serve(echoPort, echo),
		serve(lastPort, func(c *net.TCPConn) {
			b, _ := io.ReadAll(c)
			_, _ = fmt.Fprintf(c, "%d bytes", len(b))
			_ = c.Close()
		}),
		serve(firstPort, func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "bye")
			_ = c.CloseWrite()
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
		}),
		serve(resetPort, func(c *net.TCPConn) {
			_ = c.SetLinger(0)
			_ = c.Close()
		}),
		serve(silentPort, func(*net.TCPConn) {}),
		serve(webPort, func(c *net.TCPConn) {
			_, _ = c.Read(make([]byte, 4096))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 8\r\nConnection: close\r\n\r\noutside\n")
			_ = c.Close()
		}),
		serve(53, names.serve),
		datagrams("9.9.9.9:7", same), datagrams("[2a00::9]:7", same),
		datagrams("9.9.9.9:13", func([]byte) []byte { return payload(60_000) }),
		datagrams("[2a00::9]:13", func([]byte) []byte { return payload(60_000) }),
		datagrams("9.9.9.9:53", names.datagram),
	)
}

// TestZoo has a guest in a world of real servers and a real kernel between.
func TestZoo(t *testing.T) {
	arrived, ok := inZoo(t)
	if !ok {
		return
	}
	rules, err := policy.Policy{Mode: policy.Internet, AllowHost: []int{5432}}.Compile()
	if err != nil {
		t.Fatal(err)
	}
	n := New(Config{Rules: rules, Host: zooHost{}})
	g := start(t, n)
	t.Run("servers", func(t *testing.T) { zooServers(t, g) })
	t.Run("refused", func(t *testing.T) { zooRefused(t, g, n, arrived) })
	t.Run("unreachable", func(t *testing.T) { zooUnreachable(t, g) })
	t.Run("names", func(t *testing.T) { zooNamesOf(t, g, n) })
}

func zooServers(t *testing.T, g *guest) {
	for _, to := range []string{"9.9.9.9", "[2a00::9]"} {
		c := g.dial(to + ":7")
		_, _ = c.Write(payload(1 << 20))
		_ = c.CloseWrite()
		if b, err := io.ReadAll(c); err != nil || !bytes.Equal(b, payload(1<<20)) {
			t.Errorf("%s: echo of %d bytes, %v", to, len(b), err)
		}
		c = g.dial(to + ":8")
		_, _ = c.Write(payload(100_000))
		_ = c.CloseWrite()
		if b, err := io.ReadAll(c); err != nil || string(b) != "100000 bytes" {
			t.Errorf("%s: %q, %v", to, b, err)
		}
		c = g.dial(to + ":9")
		if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
			t.Errorf("%s: %q, %v", to, b, err)
		}
		if _, err := c.Write([]byte("still here")); err != nil {
			t.Error(err)
		}
		_ = c.Close()
		if c, err := g.tryDial(to + ":10"); err == nil {
			if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
				t.Errorf("%s: a reset is %v", to, err)
			}
		}
		c = g.dial(to + ":11")
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "timeout") {
			t.Errorf("%s: silence is %v", to, err)
		}
		_ = c.Close()
		web := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
			return g.tryDial(to + ":80")
		}}}
		resp, err := web.Get("http://" + to + "/")
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(resp.Body); string(b) != "outside\n" {
			t.Errorf("%s: %q", to, b)
		}
		_ = resp.Body.Close()
		exchange(t, g.dialUDP(to+":7"), payload(1200))
		u, got := g.dialUDP(to+":13"), make([]byte, maxDatagram)
		_, _ = u.Write([]byte("x"))
		if n, err := u.Read(got); err != nil || !bytes.Equal(got[:n], payload(60_000)) {
			t.Errorf("%s: a datagram of %d bytes, %v", to, n, err)
		}
	}
}

// zooRefused: what is refused is so by both protocols, at once, is counted with its
// reason, and nothing of it is seen outside, where servers do listen at it.
func zooRefused(t *testing.T, g *guest, n *Network, arrived *atomic.Int64) {
	before := arrived.Load()
	for to, why := range map[string]policy.Reason{
		"10.1.2.3": policy.Private, "192.168.77.9": policy.Private, "100.64.0.9": policy.Private, "fd00:77::9": policy.Private,
		"169.254.169.254": policy.Metadata, "168.63.129.16": policy.Metadata, "fd00:ec2::254": policy.Metadata,
		"169.254.7.7": policy.LinkLocal,
		"192.0.2.9":   policy.Documentation, "198.18.0.9": policy.Benchmark, "240.0.0.9": policy.Reserved, "2001:db8::9": policy.Documentation,
		"64:ff9b::7f00:1": policy.Loopback, "64:ff9b::a9fe:a9fe": policy.Metadata, "2002:7f00:1::1": policy.Loopback,
		// The host's own: on an interface, on its loopback, by a route, a subnet's broadcast.
		"9.9.9.1": policy.Host, "192.168.77.1": policy.Host, "8.8.4.4": policy.Host, "5.5.5.77": policy.Host,
		"2a00::1": policy.Host, "fd00:77::1": policy.Host, "2600::20": policy.Host, "9.9.9.255": policy.Broadcast,
	} {
		at := netip.AddrPortFrom(netip.MustParseAddr(to), echoPort).String()
		began := time.Now()
		_, err := g.tryDial(at)
		if took := time.Since(began); err == nil || took > patience/4 {
			t.Errorf("%s: %v after %v", at, err, took)
		}
		if !slices.ContainsFunc(n.Report().Destinations, func(r Refusal) bool { return r.Protocol == "tcp" && r.To == at && r.Reason == why }) {
			t.Errorf("%s is not refused as %q: %+v", at, why, n.Report().Destinations)
		}
		unreachable(t, g.dialUDP(at))
	}
	// A port of the host that is allowed is one of its own addresses.
	for _, at := range []string{"9.9.9.255:5432", "192.168.77.255:5432"} {
		unreachable(t, g.dialUDP(at))
		if !slices.ContainsFunc(n.Report().Destinations, func(r Refusal) bool { return r.To == at && r.Reason == policy.Broadcast }) {
			t.Errorf("%s is not refused as broadcast: %+v", at, n.Report().Destinations)
		}
	}
	if now := arrived.Load(); now != before {
		t.Errorf("%d connections came out", now-before)
	}
	if _, err := g.tryDial("[64:ff9b::808:808]:7"); err != nil {
		t.Errorf("a public address behind NAT64: %v", err)
	}
}

func zooUnreachable(t *testing.T, g *guest) {
	for to, want := range map[string]string{
		"9.9.9.9:12": "refused", "[2a00::9]:12": "refused", "9.8.8.8:80": "no route to host",
	} {
		if _, err := g.tryDial(to); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", to, err, want)
		}
	}
	unreachable(t, g.dialUDP("9.9.9.9:12"))
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	addr, protocol := full("9.9.8.8:80") // the far side forwards nothing
	if _, err := gonet.DialContextTCP(ctx, g.stack, addr, protocol); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a black hole: %v", err)
	}
}

func zooNamesOf(t *testing.T, g *guest, n *Network) {
	ask := func(protocol, name string, kind dnsmessage.Type, code dnsmessage.RCode, want ...string) {
		t.Helper()
		if got, addrs := g.resolve(protocol, name, kind); got != code || !slices.Equal(addrs, want) {
			t.Errorf("%s %s: %s %v, want %s %v", protocol, name, got, addrs, code, want)
		}
	}
	for _, protocol := range []string{"udp", "tcp"} {
		ask(protocol, "good.example.", dnsmessage.TypeA, 0, "9.9.9.9")
		ask(protocol, "good.example.", dnsmessage.TypeAAAA, 0, "2a00::9")
		ask(protocol, "chain.example.", dnsmessage.TypeA, 0, "9.9.9.9")
		ask(protocol, "inside.example.", dnsmessage.TypeA, 0)
		ask(protocol, "inside.example.", dnsmessage.TypeAAAA, 0)
		ask(protocol, "insidechain.example.", dnsmessage.TypeA, 0)
		ask(protocol, "garbage.example.", dnsmessage.TypeA, dnsmessage.RCodeServerFailure)
		ask(protocol, "nowhere.example.", dnsmessage.TypeA, dnsmessage.RCodeNameError)
	}
	ask("udp", "rebind.example.", dnsmessage.TypeA, 0, "9.9.9.9")
	ask("udp", "rebind.example.", dnsmessage.TypeA, 0)
	ask("udp", "many.example.", dnsmessage.TypeA, 0) // truncated, as its question is answered by TCP
	if _, addrs := g.resolve("tcp", "many.example.", dnsmessage.TypeA); len(addrs) != manyAddresses {
		t.Errorf("%d addresses", len(addrs))
	}
	ask("udp", "cut.example.", dnsmessage.TypeA, 0)
	if n.Report().Reasons[policy.Rebinding] == 0 {
		t.Errorf("%+v", n.Report())
	}
}
