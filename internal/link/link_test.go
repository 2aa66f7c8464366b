package link_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/holdpoint/holdpoint/internal/link"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var testMagic = link.Magic{0xa5, 0xa5, 0xa5, 1, 0xa5, 0xa5, 0xa5, 2, 9, 8, 7, 6, 5, 4, 3, 2}

// channel returns the two ends of a byte channel that outlives conversations:
// closing what the host gets closes nothing.
func channel(t *testing.T) (host func() net.Conn, guest net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	h, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	g, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close(); g.Close() })
	var last *openConn
	return func() net.Conn {
		if last != nil {
			_ = last.Close()
			last.busy.Wait()
		}
		_ = h.SetDeadline(time.Time{})
		last = &openConn{Conn: h}
		return last
	}, g
}

// openConn is a use of a connection that stays open.
type openConn struct {
	net.Conn
	mu     sync.Mutex
	closed bool
	busy   sync.WaitGroup
}

func (c *openConn) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.busy.Add(1)
	}
	return !c.closed
}

func (c *openConn) Read(p []byte) (int, error) {
	if !c.enter() {
		return 0, net.ErrClosed
	}
	defer c.busy.Done()
	return c.Conn.Read(p)
}

func (c *openConn) Write(p []byte) (int, error) {
	if !c.enter() {
		return 0, net.ErrClosed
	}
	defer c.busy.Done()
	return c.Conn.Write(p)
}

func (c *openConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil // the next use may have begun
	}
	c.closed = true
	return c.Conn.SetDeadline(time.Unix(1, 0))
}

func testCtx(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// echo serves conversations on g until it is closed: what is read is written
// back.
func echo(t *testing.T, g *link.Guest) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := g.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = g.Close(); <-done })
}

func ask(t *testing.T, c net.Conn, say []byte) {
	t.Helper()
	errc := make(chan error, 1)
	go func() { _, err := c.Write(say); errc <- err }()
	got := make([]byte, len(say))
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatal(err)
	}
	if err := <-errc; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, say) {
		t.Fatal("the answer differs from what was said")
	}
}

func TestStaleBytesBothWays(t *testing.T) {
	host, port := channel(t)
	g := link.NewGuest(port, testMagic)
	stale := make([]byte, 1300<<10)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(stale)
	copy(stale[5000:], testMagic[:15]) // nearly
	h := host()
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		_, _ = h.Write(stale)
		_, _ = port.Write(stale) // the guest's stale output
	}()
	echo(t, g)
	// The host begins only after its own stale bytes are on their way, as a
	// port hands them over in order.
	c, err := hostAfter(testCtx(t), t, h, wrote)
	if err != nil {
		t.Fatal(err)
	}
	ask(t, c, []byte("hello"))
}

// hostAfter drains what the guest says until its stale output is written, then begins.
func hostAfter(ctx context.Context, t *testing.T, c net.Conn, wrote <-chan struct{}) (net.Conn, error) {
	t.Helper()
	buf := make([]byte, 1<<20)
	for {
		select {
		case <-wrote:
			return link.Host(ctx, c, testMagic)
		default:
			_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
			_, _ = c.Read(buf)
			_ = c.SetReadDeadline(time.Time{})
		}
	}
}

func TestMagicInPieces(t *testing.T) {
	host, port := channel(t)
	g := link.NewGuest(port, testMagic)
	defer g.Close()
	hello := append(testMagic[:], "nonce678"...)
	h := host()
	for cut := 1; cut < len(hello); cut++ {
		go func() {
			_, _ = h.Write(append([]byte("junk\xa5\xa5\xa5"), hello[:cut]...))
			time.Sleep(time.Duration(cut%3) * 4 * time.Millisecond) // more and less than what is held back
			_, _ = h.Write(append(hello[cut:len(hello):len(hello)], fmt.Sprintf("say %d\n", cut)...))
		}()
		c, err := g.Accept()
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("say %d\n", cut)
		got := make([]byte, len(want))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
			t.Fatalf("cut %d: got %q, %v", cut, got, err)
		}
		answer := make([]byte, len(hello))
		if _, err := io.ReadFull(h, answer); err != nil || !bytes.Equal(answer, hello) {
			t.Fatalf("cut %d: answer %x, %v", cut, answer, err)
		}
		// The next hello ends this conversation inside a Read.
		ended := make(chan error, 1)
		go func() { _, err := io.Copy(io.Discard, c); ended <- err }()
		defer func() {
			if err := <-ended; err != nil {
				t.Errorf("cut %d: the old conversation ended with %v", cut, err)
			}
		}()
	}
	_ = g.Close()
}

func TestTwoHellosAtOnceAnswersTheLast(t *testing.T) {
	host, port := channel(t)
	g := link.NewGuest(port, testMagic)
	h := host()
	_, _ = h.Write(testMagic[:])       // a host that died before its nonce
	_, _ = h.Write([]byte{1, 2, 3})    // or in it
	_, _ = h.Write(testMagic[:])       //
	_, _ = h.Write([]byte("old-host")) // or right after it
	c, err := link.Host(testCtx(t), bothWays{h, g, t}, testMagic)
	if err != nil {
		t.Fatal(err)
	}
	ask(t, c, []byte("x"))
}

// bothWays starts the guest after the first write, so that all hellos wait for it.
type bothWays struct {
	net.Conn
	g *link.Guest
	t *testing.T
}

func (b bothWays) Write(p []byte) (int, error) {
	n, err := b.Conn.Write(p)
	if len(p) == 24 {
		echo(b.t, b.g)
	}
	return n, err
}

func TestPayloadWithPartialMagics(t *testing.T) {
	host, port := channel(t)
	echo(t, link.NewGuest(port, testMagic))
	c, err := link.Host(testCtx(t), host(), testMagic)
	if err != nil {
		t.Fatal(err)
	}
	var say []byte
	for i := range 4000 {
		say = append(say, testMagic[:i%16]...)
		say = append(say, byte(i))
	}
	ask(t, c, say)
	for n := 1; n < 16; n++ { // the partial magic last: it must not be kept
		ask(t, c, testMagic[:n])
		ask(t, c, []byte{0})
	}
}

func TestHostReconnectsMidTransfer(t *testing.T) {
	host, port := channel(t)
	g := link.NewGuest(port, testMagic)
	served := make(chan int)
	go func() { // the guest floods each conversation and reads it
		n := 0
		defer func() { served <- n }()
		for {
			c, err := g.Accept()
			if err != nil {
				return
			}
			n++
			flooded := make(chan struct{})
			go func() {
				defer close(flooded)
				flood := bytes.Repeat([]byte{0xa5, 1}, 32<<10)
				_, _ = c.Write([]byte("hi!"))
				for {
					if _, err := c.Write(flood); err != nil {
						return
					}
				}
			}()
			_, _ = io.Copy(io.Discard, c)
			<-flooded
		}
	}()
	const rounds = 100
	for range rounds {
		c, err := link.Host(testCtx(t), host(), testMagic)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 3+100<<10)
		if _, err := io.ReadFull(c, got); err != nil || string(got[:3]) != "hi!" {
			t.Fatalf("got %q, %v", got[:3], err)
		}
		_ = c.SetWriteDeadline(time.Now().Add(2 * time.Millisecond))
		_, _ = c.Write(bytes.Repeat([]byte{0xa5}, 200<<10)) // cut anywhere
	}
	_ = g.Close()
	if n := <-served; n != rounds {
		t.Fatalf("the guest saw %d conversations, want %d", n, rounds)
	}
}

func TestHostDeadline(t *testing.T) {
	host, _ := channel(t)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	if _, err := link.Host(ctx, host(), testMagic); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("error %v, want the deadline", err)
	}
}

func TestPortEnd(t *testing.T) {
	host, port := channel(t)
	g := link.NewGuest(port, testMagic)
	got := make(chan net.Conn)
	go func() { c, _ := g.Accept(); got <- c }()
	if _, err := link.Host(testCtx(t), host(), testMagic); err != nil {
		t.Fatal(err)
	}
	c := <-got
	_ = host().(*openConn).Conn.Close()
	if _, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Fatalf("read error %v, want EOF", err)
	}
	if _, err := g.Accept(); !errors.Is(err, io.EOF) {
		t.Fatalf("accept error %v, want EOF", err)
	}
}

// TestServe carries requests over twenty conversations, each left while a
// transfer is under way, and expects the last one to be whole.
func TestServe(t *testing.T) {
	host, port := channel(t)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	body := make([]byte, 3<<20)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(body)
	go func() {
		served <- link.Serve(ctx, link.NewGuest(port, testMagic), link.ServeConfig{
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				for b := body; len(b) > 0; b = b[min(len(b), 100_000):] {
					_, _ = w.Write(b[:min(len(b), 100_000)])
				}
			}),
		})
	}()
	for round := range 20 {
		c, err := link.Host(testCtx(t), host(), testMagic)
		if err != nil {
			t.Fatal(err)
		}
		tr := link.NewTransport(c)
		req, _ := http.NewRequestWithContext(testCtx(t), "POST", "http://guest/", bytes.NewReader(body))
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if resp.ProtoMajor != 2 {
			t.Fatalf("spoke %s", resp.Proto)
		}
		if round < 19 {
			_, _ = io.CopyN(io.Discard, resp.Body, 1<<20)
			_ = resp.Body.Close()
		} else {
			got, err := io.ReadAll(resp.Body)
			if err != nil || sha256.Sum256(got) != sha256.Sum256(body) {
				t.Fatalf("got %d bytes, %v", len(got), err)
			}
		}
		tr.CloseIdleConnections()
	}
	cancel()
	if err := <-served; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestParseMagic(t *testing.T) {
	m := link.NewMagic()
	got, err := link.ParseMagic(m.String())
	if err != nil || got != m {
		t.Fatalf("got %v, %v", got, err)
	}
	for _, bad := range []string{"", "00", m.String() + "00", "zz" + m.String()[2:]} {
		if _, err := link.ParseMagic(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}
