package relay_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
)

// guest is an agent at the other end of a pipe, in the time of the bubble.
type guest struct {
	agentv1connect.UnimplementedAgentServiceHandler
	pings, told atomic.Int64
	delay       atomic.Int64 // of what the host says, in nanoseconds
	port        net.Conn
	host        net.Conn
	done        chan struct{}
	magic       link.Magic
	heardAll    sync.WaitGroup // until the host has heard what Download says
	answers     []int          // sizes, of what ListCommands lists
}

// newGuest runs the guest. Between the host and the port is a goroutine that
// can stand still, as a guest does whose CPUs do.
func newGuest(t *testing.T) *guest {
	return newGuestOf(t, func(g *guest) handler { return g })
}

type handler = agentv1connect.AgentServiceHandler

// newGuestOf runs a guest whose agent is what agent makes of it.
func newGuestOf(t *testing.T, agent func(*guest) handler) *guest {
	g := &guest{done: make(chan struct{}), magic: link.NewMagic()}
	host, near := net.Pipe()
	far, port := net.Pipe()
	g.host, g.port = host, port
	// What the host says waits outside of both ends' locks.
	said := make(chan []byte, 1000)
	var pumps sync.WaitGroup
	pumps.Go(func() {
		defer close(said)
		for {
			buf := make([]byte, 4096)
			n, err := near.Read(buf)
			if err != nil {
				return
			}
			said <- buf[:n]
		}
	})
	pumps.Go(func() {
		for b := range said {
			time.Sleep(time.Duration(g.delay.Load()))
			_, _ = far.Write(b)
		}
	})
	pumps.Go(func() {
		_, _ = io.Copy(near, far)
		_ = near.Close()
	})
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewAgentServiceHandler(agent(g)))
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer close(g.done)
		_ = link.Serve(ctx, link.NewGuest(port, g.magic), link.ServeConfig{Handler: mux})
	}()
	t.Cleanup(func() {
		cancel()
		_, _, _ = near.Close(), far.Close(), port.Close()
		pumps.Wait()
		<-g.done
	})
	return g
}

func (g *guest) DialLink(context.Context) (net.Conn, error) { return g.host, nil }

func (g *guest) Ping(context.Context, *connect.Request[agentv1.PingRequest]) (*connect.Response[agentv1.PingResponse], error) {
	g.pings.Add(1)
	return connect.NewResponse(&agentv1.PingResponse{Configured: g.told.Load() > 0}), nil
}

func (g *guest) Configure(_ context.Context, req *connect.Request[agentv1.ConfigureRequest]) (*connect.Response[agentv1.ConfigureResponse], error) {
	if req.Msg.GetHostname() == "m" && len(req.Msg.GetEntropy()) == 64 && req.Msg.GetUnixNano() != 0 {
		g.told.Add(1)
	}
	return connect.NewResponse(&agentv1.ConfigureResponse{}), nil
}

// attend converses with the guest and gives how long the conversation was
// attended to, at most limit of the bubble's time.
func attend(t *testing.T, g *guest, limit time.Duration, paused func() bool) (time.Duration, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conv := converse(t, g)
	defer conv.Close()
	began := time.Now()
	err := conv.Attend(ctx, paused)
	return time.Since(began), err
}

func converse(t *testing.T, g *guest) *relay.Conversation {
	t.Helper()
	how := relay.Guest{Magic: g.magic}
	conv, err := how.Converse(context.Background(), g, time.Minute)
	if err == nil {
		err = conv.Configure(context.Background(), &agentv1.ConfigureRequest{Hostname: "m"})
	}
	if err != nil {
		t.Fatal(err)
	}
	return conv
}

func never() bool { return false }

func TestQuietGuestIsProbedAndKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuest(t)
		lived, err := attend(t, g, time.Hour, never)
		if lived != time.Hour {
			t.Errorf("given up after %s: %v", lived, err)
		}
		if n := g.pings.Load(); n < 60 || n > 181 {
			t.Errorf("%d pings in an hour", n)
		}
		if g.told.Load() != 1 {
			t.Errorf("told %d times", g.told.Load())
		}
	})
}

func TestSlowGuestIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuest(t)
		conv := converse(t, g)
		defer conv.Close()
		g.delay.Store(int64(15 * time.Second))
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		began := time.Now()
		if err := conv.Attend(ctx, never); time.Since(began) != time.Hour {
			t.Errorf("given up after %s: %v", time.Since(began), err)
		}
	})
}

func TestHungGuestIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuest(t)
		conv := converse(t, g)
		defer conv.Close()
		g.delay.Store(int64(24 * time.Hour))
		began := time.Now()
		err := conv.Attend(context.Background(), never)
		if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "silent") || took < time.Minute || took > 90*time.Second {
			t.Errorf("after %s: %v", took, err)
		}
	})
}

func TestPausedGuestIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuest(t)
		conv := converse(t, g)
		defer conv.Close()
		g.delay.Store(int64(24 * time.Hour))
		var paused atomic.Bool
		paused.Store(true)
		resume := time.AfterFunc(10*time.Hour, func() { paused.Store(false) })
		defer resume.Stop()
		began := time.Now()
		err := conv.Attend(context.Background(), paused.Load)
		if took := time.Since(began); took < 10*time.Hour+time.Minute || took > 10*time.Hour+2*time.Minute {
			t.Errorf("after %s: %v", took, err)
		}
	})
}

func TestBrokenLinkIsNoticedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuest(t)
		conv := converse(t, g)
		defer conv.Close()
		time.AfterFunc(time.Second, func() { _ = g.port.Close() })
		began := time.Now()
		err := conv.Attend(context.Background(), never)
		if took := time.Since(began); err == nil || took > time.Second+100*time.Millisecond {
			t.Errorf("after %s: %v", took, err)
		}
	})
}
