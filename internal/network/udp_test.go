package network

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// exchange sends a datagram and wants it back.
func exchange(t *testing.T, c *gonet.UDPConn, d []byte) {
	t.Helper()
	if _, err := c.Write(d); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, maxDatagram)
	n, err := c.Read(got)
	if err != nil || !bytes.Equal(got[:n], d) {
		t.Fatalf("%d bytes came back of %d: %v", n, len(d), err)
	}
}

// unreachable sends a datagram and wants to be told that it does not arrive.
func unreachable(t *testing.T, c *gonet.UDPConn) {
	t.Helper()
	_, _ = c.Write([]byte("x"))
	var err error
	for began := time.Now(); time.Since(began) < patience; { // an error of a socket does not wake its readers
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		if _, err = c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "refused") {
			break
		}
	}
	if err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("%v: %v", c.RemoteAddr(), err)
	}
}

func TestUDP(t *testing.T) {
	o := newOutside()
	server := listenUDP(t, same)
	o.put("udp", "1.1.1.1:123", server)
	o.put("udp", "[2606:4700::1111]:123", server)
	n := network(t, o, policy.Policy{Mode: policy.Internet})
	g := start(t, n)
	for _, to := range []string{"1.1.1.1:123", "[2606:4700::1111]:123"} {
		c := g.dialUDP(to)
		for _, size := range []int{0, 1, 1400, 9000, 60_000} {
			exchange(t, c, payload(size))
		}
	}
	for _, to := range []string{"10.0.0.1:53", "[fd00::1]:53", "169.254.0.9:53"} {
		unreachable(t, g.dialUDP(to))
	}
	if r := n.Report(); r.Reasons[policy.Private] != 2 || r.Reasons[policy.LinkLocal] != 1 {
		t.Errorf("%+v", r)
	}
}

// TestFlowsAreApart: what answers one port does not reach another.
func TestFlowsAreApart(t *testing.T) {
	o := newOutside()
	o.put("udp", "1.1.1.1:123", listenUDP(t, same))
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet}))
	var all sync.WaitGroup
	for i := range 50 {
		c := g.dialUDP("1.1.1.1:123")
		all.Go(func() {
			for j := range 10 {
				d := payload(100 + i*10 + j)
				_, _ = c.Write(d)
				got := make([]byte, 2000)
				if n, err := c.Read(got); err != nil || !bytes.Equal(got[:n], d) {
					t.Errorf("flow %d: %d bytes, %v", i, n, err)
				}
			}
		})
	}
	all.Wait()
}

// TestIdleFlowsEnd: a flow without datagrams makes room, and its next datagram begins it anew.
func TestIdleFlowsEnd(t *testing.T) {
	o := newOutside()
	o.put("udp", "1.1.1.1:123", listenUDP(t, same))
	n := network(t, o, policy.Policy{Mode: policy.Internet})
	n.limits = limits{tcp: 1, udp: 1, idle: 300 * time.Millisecond, dial: time.Minute, keep: time.Hour}
	g := start(t, n)
	c := g.dialUDP("1.1.1.1:123")
	exchange(t, c, []byte("one"))
	other := g.dialUDP("1.1.1.1:123")
	for began := time.Now(); ; { // refused until the first one has ended
		_, _ = other.Write([]byte("x"))
		_ = other.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		if _, err := other.Read(make([]byte, 1)); err == nil {
			break
		} else if time.Since(began) > patience {
			t.Fatal(err)
		}
	}
	if o.tried("udp", "1.1.1.1:123") < 2 {
		t.Error("the first flow has not ended")
	}
}
