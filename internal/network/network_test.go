package network

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

func TestMain(m *testing.M) {
	if os.Getenv(insideZoo) != "" {
		os.Exit(m.Run()) // its servers end with the process
	}
	goleak.VerifyTestMain(m)
}

func echo(c *net.TCPConn) {
	_, _ = io.Copy(c, c)
	_ = c.CloseWrite()
}

func same(b []byte) []byte { return b }

// payload is bytes that show when one is lost or twice there.
func payload(size int) []byte {
	b := make([]byte, 0, size+8)
	for i := 0; len(b) < size; i++ {
		b = binary.BigEndian.AppendUint64(b, uint64(i)*0x9e3779b97f4a7c15)
	}
	return b[:size]
}

func TestTCP(t *testing.T) {
	o := newOutside()
	server := listen(t, echo)
	for _, to := range []string{"1.1.1.1:80", "[2606:4700::1111]:443"} {
		o.put("tcp", to, server)
	}
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet}))
	for _, to := range []string{"1.1.1.1:80", "[2606:4700::1111]:443"} {
		c := g.dial(to)
		sent := payload(8 << 20)
		var writer sync.WaitGroup
		writer.Go(func() {
			if _, err := c.Write(sent); err != nil {
				t.Error(err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Error(err)
			}
		})
		got, err := io.ReadAll(c)
		writer.Wait()
		if err != nil || !bytes.Equal(got, sent) {
			t.Errorf("%s: %d bytes came back of %d: %v", to, len(got), len(sent), err)
		}
		_ = c.Close()
	}
}

// TestHalfClose: each side may go on sending when the other has ended.
func TestHalfClose(t *testing.T) {
	o := newOutside()
	said := make(chan string, 1)
	o.put("tcp", "1.1.1.1:80", listen(t, func(c *net.TCPConn) { // ends first, then listens
		_, _ = io.WriteString(c, "bye")
		_ = c.CloseWrite()
		b, _ := io.ReadAll(c)
		said <- string(b)
	}))
	o.put("tcp", "1.1.1.1:443", listen(t, func(c *net.TCPConn) { // listens to the end, then speaks
		b, _ := io.ReadAll(c)
		_, _ = fmt.Fprintf(c, "%d bytes", len(b))
	}))
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet}))
	c := g.dial("1.1.1.1:80")
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
		t.Fatalf("%q, %v", b, err)
	}
	_, _ = io.WriteString(c, "still here")
	_ = c.CloseWrite()
	if got := <-said; got != "still here" {
		t.Errorf("the server heard %q", got)
	}
	c = g.dial("1.1.1.1:443")
	_, _ = c.Write(payload(100_000))
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "100000 bytes" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestRefusedAtOnce: nothing is dialed, the guest gets a reset, and it is counted.
func TestRefusedAtOnce(t *testing.T) {
	o := newOutside()
	o.own = []string{"8.8.4.4"}
	n := network(t, o, policy.Policy{Mode: policy.Internet, AllowHost: []int{5432}})
	g := start(t, n)
	for to, why := range map[string]policy.Reason{
		"10.0.0.1:80": policy.Private, "169.254.169.254:80": policy.Metadata,
		"8.8.4.4:80": policy.Host, Gateway4 + ":80": policy.Host, "[fd00::1]:80": policy.Private,
		"[64:ff9b::7f00:1]:80": policy.Loopback, "[" + Gateway6 + "]:22": policy.Host, "203.0.113.9:80": policy.Documentation,
	} {
		began := time.Now()
		if _, err := g.tryDial(to); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("%s: %v", to, err)
		}
		if took := time.Since(began); took > patience/4 {
			t.Errorf("%s: refused after %v", to, took)
		}
		if o.tried("tcp", to) != 0 {
			t.Errorf("%s was dialed", to)
		}
		found := false
		for _, r := range n.Report().Destinations {
			found = found || r.Protocol == "tcp" && r.To == to && r.Reason == why && r.Count == 1
		}
		if !found {
			t.Errorf("%s (%s) is not in %+v", to, why, n.Report())
		}
	}
	if r := n.Report(); r.Total != 8 || r.Reasons[policy.Host] != 3 {
		t.Errorf("%+v", r)
	}
}

// TestHostPort: a port of the host's loopback is at the gateway's address.
func TestHostPort(t *testing.T) {
	o := newOutside()
	o.put("tcp", "127.0.0.1:5432", listen(t, echo))
	o.put("tcp", "[::1]:5433", listen(t, echo))
	o.put("udp", "127.0.0.1:5432", listenUDP(t, same))
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet, AllowHost: []int{5432, 5433}}))
	for _, to := range []string{Gateway4 + ":5432", "[" + Gateway6 + "]:5432", Gateway4 + ":5433"} {
		c := g.dial(to)
		_, _ = io.WriteString(c, "hello")
		_ = c.CloseWrite()
		if b, err := io.ReadAll(c); string(b) != "hello" {
			t.Errorf("%s: %q, %v", to, b, err)
		}
	}
	exchange(t, g.dialUDP(Gateway4+":5432"), []byte("hello"))
}

// TestResets: what ends by a reset, or never began, on one side, does so on the other.
func TestResets(t *testing.T) {
	o := newOutside()
	heard := make(chan error, 1)
	o.put("tcp", "1.1.1.1:80", listen(t, func(c *net.TCPConn) {
		_, _ = c.Read(make([]byte, 1))
		_ = c.SetLinger(0)
	}))
	o.put("tcp", "1.1.1.1:443", listen(t, func(c *net.TCPConn) {
		_, err := io.Copy(io.Discard, c)
		heard <- err
	}))
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet}))
	if _, err := g.tryDial("1.1.1.1:7"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("nobody listens: %v", err)
	}
	c := g.dial("1.1.1.1:80")
	_, _ = io.WriteString(c, "x")
	if _, err := io.ReadAll(c); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("the server resets: %v", err)
	}
	c = g.dial("1.1.1.1:443")
	_, _ = io.WriteString(c, "x")
	g.abort(c)
	if err := <-heard; err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("the guest resets: %v", err)
	}
}

// abort ends the guest's connection without a word.
func (g *guest) abort(c *gonet.TCPConn) {
	for _, e := range g.stack.RegisteredEndpoints() {
		if ep, ok := e.(tcpip.Endpoint); ok {
			if addr, err := ep.GetLocalAddress(); err == nil && int(addr.Port) == c.LocalAddr().(*net.TCPAddr).Port {
				ep.Abort()
			}
		}
	}
}

// TestThousandConnections are held at the same time, beside as many attempts that
// nobody answers.
func TestThousandConnections(t *testing.T) {
	o := newOutside()
	o.put("tcp", "1.1.1.1:80", listen(t, echo))
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet}))
	var holes sync.WaitGroup
	defer holes.Wait()
	for i := range 300 {
		holes.Go(func() {
			addr, protocol := full(fmt.Sprintf("1.1.%d.%d:81", 1+i/200, i%200))
			if c, err := gonet.DialTCP(g.stack, addr, protocol); err == nil {
				_ = c.Close()
			}
		})
	}
	conns := make([]*gonet.TCPConn, 1000)
	var dials sync.WaitGroup
	slots := make(chan struct{}, 100)
	for i := range conns {
		dials.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			c, err := g.tryDial("1.1.1.1:80")
			if err != nil {
				t.Errorf("connection %d: %v", i, err)
				return
			}
			conns[i] = c
		})
	}
	dials.Wait()
	for i, c := range conns {
		if c == nil {
			t.FailNow()
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		text, got := fmt.Sprint("connection ", i), make([]byte, 64)
		_, _ = io.WriteString(c, text)
		if n, err := c.Read(got); string(got[:n]) != text {
			t.Fatalf("%q: %q, %v", text, got[:n], err)
		}
	}
	for _, c := range conns {
		_ = c.Close()
	}
	for _, e := range g.stack.RegisteredEndpoints() {
		e.Abort()
	}
}

// TestLimits: one connection or flow too many is refused, and one that ends makes room.
func TestLimits(t *testing.T) {
	o := newOutside()
	o.put("tcp", "1.1.1.1:80", listen(t, echo))
	o.put("udp", "1.1.1.1:80", listenUDP(t, same))
	n := network(t, o, policy.Policy{Mode: policy.Internet})
	n.limits = limits{tcp: 2, udp: 1, idle: time.Hour, dial: time.Minute, keep: time.Hour}
	g := start(t, n)
	first := g.dial("1.1.1.1:80")
	g.dial("1.1.1.1:80")
	if _, err := g.tryDial("1.1.1.1:80"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a third: %v", err)
	}
	_ = first.CloseWrite()
	if _, err := io.ReadAll(first); err != nil {
		t.Error(err)
	}
	_ = first.Close()
	for began := time.Now(); ; { // the other side of the close is on its way
		if _, err := g.tryDial("1.1.1.1:80"); err == nil {
			break
		} else if time.Since(began) > patience {
			t.Fatal(err)
		}
	}
	exchange(t, g.dialUDP("1.1.1.1:80"), []byte("x"))
	unreachable(t, g.dialUDP("1.1.1.1:80"))
	if r := n.Report(); r.Reasons[policy.Limit] < 2 {
		t.Errorf("%+v", r)
	}
}

// TestReconnect: what follows a link knows nothing of the connections there were,
// and says so at the next segment of each.
func TestReconnect(t *testing.T) {
	o := newOutside()
	ended := make(chan error, 1)
	o.put("tcp", "1.1.1.1:80", listen(t, func(c *net.TCPConn) {
		_, err := io.Copy(c, c)
		ended <- err
	}))
	o.put("udp", "1.1.1.1:80", listenUDP(t, same))
	n := network(t, o, policy.Policy{Mode: policy.Internet})
	g := newGuest(t)
	unplug := g.plug(n)
	c := g.dial("1.1.1.1:80")
	_, _ = io.WriteString(c, "x")
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	flow := g.dialUDP("1.1.1.1:80")
	exchange(t, flow, []byte("one"))
	unplug()
	if err := <-ended; err == nil {
		t.Error("the outside was told of an orderly end that was none")
	}
	t.Cleanup(g.plug(network(t, o, policy.Policy{Mode: policy.Internet})))
	_, _ = io.WriteString(c, "y")
	if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("an old connection: %v", err)
	}
	exchange(t, flow, []byte("two")) // UDP has no connections to lose
	_ = g.dial("1.1.1.1:80").Close()
}

func TestGatewayEnds(t *testing.T) {
	a, b := pair(t)
	n := network(t, newOutside(), policy.Policy{Mode: policy.Internet})
	_, _ = a.Write([]byte{0xff, 0xff, 0xff, 0xff})
	if err := n.Serve(t.Context(), b); err == nil || !strings.Contains(err.Error(), "frame of 4294967295 bytes") {
		t.Errorf("a frame that is too long: %v", err)
	}
	a, b = pair(t)
	_, _ = a.Write([]byte{0, 0, 0, 9, 1})
	_ = a.Close()
	if err := n.Serve(t.Context(), b); err == nil || !strings.Contains(err.Error(), "unexpected EOF") {
		t.Errorf("half a frame: %v", err)
	}
	a, b = pair(t)
	_ = a.Close()
	if err := n.Serve(t.Context(), b); err != nil {
		t.Errorf("no frame: %v", err)
	}
}

func TestReportIsBounded(t *testing.T) {
	r := newRefusals()
	for i := range 1000 {
		r.add("tcp", fmt.Sprint("1.1.1.1:", i), policy.Private, "")
	}
	report := r.report()
	if report.Total != 1000 || len(report.Destinations) != maxDestinations || report.Destinations[0].To != "1.1.1.1:999" {
		t.Errorf("%d destinations of %d, first %+v", len(report.Destinations), report.Total, report.Destinations[0])
	}
}
