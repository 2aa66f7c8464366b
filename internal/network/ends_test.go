package network

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// TestUnreachable: what the host's kernel says of a destination is what the guest's is told.
func TestUnreachable(t *testing.T) {
	o := newOutside()
	o.errs = map[string]error{}
	for _, to := range []string{"1.1.1.1:", "[2606:4700::1111]:"} {
		for port, errno := range map[string]syscall.Errno{
			"1": syscall.ECONNREFUSED, "2": syscall.EHOSTUNREACH, "3": syscall.ENETUNREACH,
		} {
			o.errs["tcp "+to+port], o.errs["udp "+to+port] = errno, errno
		}
	}
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet}))
	for _, to := range []string{"1.1.1.1:", "[2606:4700::1111]:"} {
		for port, want := range map[string]string{"1": "refused", "2": "no route to host", "3": "network is unreachable"} {
			if port == "2" && to[0] == '[' {
				continue // the double does not know the code, guests do: test/vm
			}
			began := time.Now()
			if _, err := g.tryDial(to + port); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s%s: %v, want %q", to, port, err, want)
			}
			if took := time.Since(began); took > patience/4 {
				t.Errorf("%s%s: %v", to, port, took)
			}
		}
		unreachable(t, g.dialUDP(to+"1"))
	}
}

// TestUnreachableLater: a flow whose server goes away is told so, too.
func TestUnreachableLater(t *testing.T) {
	gone, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o := newOutside()
	o.put("udp", "1.1.1.1:123", gone.LocalAddr())
	g := start(t, network(t, o, policy.Policy{Mode: policy.Internet}))
	_ = gone.Close()
	unreachable(t, g.dialUDP("1.1.1.1:123"))
}

// TestBlackHole: a connection that nobody answers is not answered, so that the guest
// waits for as long as it would, and asks again.
func TestBlackHole(t *testing.T) {
	o := newOutside()
	n := network(t, o, policy.Policy{Mode: policy.Internet})
	n.limits.dial = 50 * time.Millisecond
	g := start(t, n)
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond) // a SYN is sent again after a second
	defer cancel()
	addr, protocol := full("1.1.1.1:81")
	if c, err := gonet.DialContextTCP(ctx, g.stack, addr, protocol); err != context.DeadlineExceeded {
		t.Errorf("%v, %v", c, err)
	}
	if tried := o.tried("tcp", "1.1.1.1:81"); tried < 2 {
		t.Errorf("it was tried %d times", tried)
	}
}

// TestRepeatedSYN: one that is repeated while the connection is being made leaves
// nothing behind.
func TestRepeatedSYN(t *testing.T) {
	s := &session{syns: make(map[stack.TransportEndpointID]uint32)}
	syn := func(seq uint32) *stack.PacketBuffer {
		h := make(header.TCP, header.TCPMinimumSize)
		h.Encode(&header.TCPFields{SeqNum: seq, DataOffset: header.TCPMinimumSize, Flags: header.TCPFlagSyn})
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(h)})
		if _, ok := pkt.TransportHeader().Consume(len(h)); !ok {
			t.Fatal("no header")
		}
		return pkt
	}
	id := stack.TransportEndpointID{RemotePort: 1}
	s.noteSYN(id, syn(7))
	seq, known, forget := s.notedSYN(id)
	s.noteSYN(id, syn(7))
	if seq != 7 || !known {
		t.Errorf("%d, %v", seq, known)
	}
	forget()
	if len(s.syns) != 0 {
		t.Errorf("left: %v", s.syns)
	}
}

// TestConnectsAreLimited: connections that are only being made count, and one too many
// is refused at once.
func TestConnectsAreLimited(t *testing.T) {
	n := network(t, newOutside(), policy.Policy{Mode: policy.Internet})
	n.limits.tcp = 20
	g := start(t, n)
	ctx, cancel := context.WithCancel(t.Context())
	var holes sync.WaitGroup
	refused := make(chan error, 40)
	for i := range 40 {
		holes.Go(func() {
			addr, protocol := full(fmt.Sprintf("1.1.1.%d:81", i))
			_, err := gonet.DialContextTCP(ctx, g.stack, addr, protocol)
			refused <- err
		})
	}
	for i := range 20 {
		if err := <-refused; err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("%d: %v", i, err)
		}
	}
	cancel()
	holes.Wait()
	if r := n.Report(); r.Reasons[policy.Limit] != 20 {
		t.Errorf("%+v", r)
	}
}

// TestForgotten: a connection that the guest has closed and forgotten, and the server
// has not, ends; one that the guest still listens to does not.
func TestForgotten(t *testing.T) {
	o := newOutside()
	ended := make(chan struct{})
	o.put("tcp", "1.1.1.1:80", listen(t, func(c *net.TCPConn) {
		_, _ = io.Copy(io.Discard, c)                                           // to the guest's last word
		for began := time.Now(); !isReset(c) && time.Since(began) < patience; { // nobody is told who has heard all
			runtime.Gosched()
		}
		close(ended)
	}))
	done := make(chan struct{})
	o.put("tcp", "1.1.1.1:443", listen(t, func(c *net.TCPConn) {
		_, _ = io.Copy(io.Discard, c)
		<-done
		_, _ = io.WriteString(c, "at last")
	}))
	n := network(t, o, policy.Policy{Mode: policy.Internet})
	n.limits.keep = 50 * time.Millisecond
	g := newGuest(t)
	forget := tcpip.TCPLingerTimeoutOption(100 * time.Millisecond)
	if err := g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &forget); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.plug(n))
	listens := g.dial("1.1.1.1:443")
	_ = listens.CloseWrite()
	_ = g.dial("1.1.1.1:80").Close()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Error("the forgotten connection stays")
	}
	close(done)
	if b, err := io.ReadAll(listens); string(b) != "at last" {
		t.Errorf("%q, %v", b, err)
	}
}

// isReset reports whether the connection was reset.
func isReset(c *net.TCPConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var errno int
	_ = raw.Control(func(fd uintptr) { errno, _ = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_ERROR) })
	return errno != 0
}

// small bounds what the guest itself keeps of each connection.
func (g *guest) small() {
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4 << 10, Default: 16 << 10, Max: 16 << 10}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: 4 << 10, Default: 16 << 10, Max: 16 << 10}
	for _, option := range []tcpip.SettableTransportProtocolOption{&receive, &send} {
		if err := g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			g.t.Fatal(err)
		}
	}
}

// TestSlowReaders: of two sides that send and do not read each is stopped, and what is
// under way between them stays small however many there are.
func TestSlowReaders(t *testing.T) {
	const connections, quiet = 64, 300 * time.Millisecond
	o := newOutside()
	var taken atomic.Int64
	over := make(chan struct{})
	o.put("tcp", "1.1.1.1:80", listen(t, func(c *net.TCPConn) {
		_, _ = c.SetWriteBuffer(64<<10), c.SetReadBuffer(64<<10)
		fill(c, quiet, &taken)
		<-over
	}))
	g := newGuest(t)
	g.small()
	before := heap()
	unplug := g.plug(network(t, o, policy.Policy{Mode: policy.Internet}))
	var all sync.WaitGroup
	for range connections {
		c := g.dial("1.1.1.1:80")
		all.Go(func() { fill(c, quiet, &taken) })
		defer c.Close()
	}
	all.Wait()
	// In user space: twice the room, two copies and the guest's own; some more in the kernel.
	if grown := heap() - before; grown > 150<<20 {
		t.Errorf("%d connections take %d MiB", connections, grown>>20)
	}
	t.Logf("%d connections have taken %d MiB, the process has %d MiB more", connections, taken.Load()>>20, (heap()-before)>>20)
	close(over)
	unplug()
	for _, e := range g.stack.RegisteredEndpoints() {
		e.Abort()
	}
}

// fill writes until nothing has been taken for so long.
func fill(c net.Conn, quiet time.Duration, taken *atomic.Int64) {
	block := make([]byte, 16<<10)
	for {
		_ = c.SetWriteDeadline(time.Now().Add(quiet))
		n, err := c.Write(block)
		taken.Add(int64(n))
		if err != nil {
			return
		}
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse)
}

// TestRoom: the sum of what all connections may keep is bounded.
func TestRoom(t *testing.T) {
	sum := 0
	for n := range maxTCP {
		sum += 2*room(n+1) + 2*room(n+1)/4
	}
	if sum > 600<<20 {
		t.Errorf("%d MiB", sum>>20)
	}
}

// TestIsTimeout: silence is told from an answer.
func TestIsTimeout(t *testing.T) {
	for err, want := range map[error]bool{
		context.DeadlineExceeded: true, os.ErrDeadlineExceeded: true,
		&net.OpError{Err: os.NewSyscallError("connect", syscall.ETIMEDOUT)}:    true,
		&net.OpError{Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}: false,
	} {
		if got := isTimeout(err); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
}
