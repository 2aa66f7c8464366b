package relay

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
)

// The times of the agent link.
//
// A torn link hangs up every command that runs over it, so a slow guest must
// not be taken for a hung one: under TCG on a loaded host a round trip of the
// usual 2.5 ms was seen to take 370 ms, and a vCPU may not be scheduled for
// seconds. The guest kernel's own watchdog calls a CPU stuck after 20 s
// (kernel.watchdog_thresh); we look after that long without a byte, and give
// up after three times as long. Any byte is a sign of life, so a busy link is
// never probed, and the clock stands still while a user has paused the guest.
const (
	quietBeforeProbe = 20 * time.Second
	quietBeforeGone  = 60 * time.Second
)

// Guest is how to begin a conversation with a machine's guest agent.
type Guest struct {
	Magic link.Magic
}

// Dialer gives connections to the agent link, one at a time (machine.Run).
type Dialer interface {
	DialLink(ctx context.Context) (net.Conn, error)
}

// Conversation is one HTTP/2 connection to the guest agent over the link. Its
// life: Converse makes it; Configure or Continue tells the guest who it is;
// requests go through it, Attend watches it; it breaks when it can carry no
// more; Close ends it.
type Conversation struct {
	// RunID is the run whose guest it is with, for whoever made it.
	RunID string

	rt     *http.ClientConn
	agent  agentv1connect.AgentServiceClient
	heard  *atomic.Int64 // unix nanoseconds of the last byte from the guest
	broken chan struct{}
}

// Agent is the guest agent, asked through this conversation.
func (c *Conversation) Agent() agentv1connect.AgentServiceClient { return c.agent }

// Attend watches the conversation until it is broken, the guest is silent for
// too long, or ctx ends. While paused says so, the guest need not answer.
func (c *Conversation) Attend(ctx context.Context, paused func() bool) error {
	ctx, cancel := context.WithCancel(ctx)
	var probes sync.WaitGroup
	defer probes.Wait()
	defer cancel()
	tick := time.NewTicker(quietBeforeProbe / 2)
	defer tick.Stop()
	awake := time.Now() // since when the guest has been able to answer
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.broken:
			return errdefs.New(errdefs.WrongState, "the link to the guest agent broke: %w", c.rt.Err())
		case <-tick.C:
		}
		if paused() {
			awake = time.Now()
			continue
		}
		quiet := min(time.Since(awake), time.Since(time.Unix(0, c.heard.Load())))
		if quiet > quietBeforeGone {
			return errdefs.New(errdefs.WrongState, "the guest agent has been silent for %s", quiet.Round(time.Second))
		}
		if quiet > quietBeforeProbe {
			probes.Go(func() {
				// Its answer is heard as bytes; its failure as their absence.
				_, _ = c.agent.Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
			})
		}
	}
}

// Converse connects to the guest agent and greets it. A guest that still boots
// is waited for as long as patience, which bounds the greeting.
func (g *Guest) Converse(ctx context.Context, run Dialer, patience time.Duration) (*Conversation, error) {
	greet, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	raw, err := run.DialLink(greet)
	if err != nil {
		return nil, fmt.Errorf("dial agent link: %w", err)
	}
	conn, err := link.Host(greet, raw, g.Magic)
	if err != nil {
		return nil, err
	}
	conv, err := newConversation(ctx, conn)
	if err != nil {
		_ = conn.Close() // the error says more
		return nil, err
	}
	return conv, nil
}

// newConversation begins HTTP/2 on a greeted connection, which it owns from
// then on if it gives no error.
func newConversation(ctx context.Context, conn net.Conn) (*Conversation, error) {
	conv := &Conversation{heard: new(atomic.Int64), broken: make(chan struct{})}
	conv.heard.Store(time.Now().UnixNano())
	transport := link.NewTransport(&heardConn{Conn: conn, at: conv.heard})
	transport.HTTP2 = linkHTTP2()
	rt, err := transport.NewClientConn(ctx, "http", "guest:80")
	if err != nil {
		return nil, fmt.Errorf("begin HTTP/2 with guest agent: %w", err)
	}
	conv.rt = rt
	var once sync.Once
	rt.SetStateHook(func(rt *http.ClientConn) {
		if rt.Err() != nil {
			once.Do(func() { close(conv.broken) })
		}
	})
	conv.agent = agentv1connect.NewAgentServiceClient(&http.Client{Transport: rt}, "http://guest", Plain())
	return conv, nil
}

// Close ends the conversation and all requests in it.
func (c *Conversation) Close() {
	_ = c.rt.Close() // nothing is lost that was not lost before
	<-c.broken
}

// heardConn notes when something was read.
type heardConn struct {
	net.Conn
	at *atomic.Int64
}

func (c *heardConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.at.Store(time.Now().UnixNano())
	}
	return n, err
}
