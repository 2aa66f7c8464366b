//go:build linux

package monitor

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/machine"
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
	// handshakeTimeout bounds one attempt; a booting guest opens its end of
	// the port when it is ready, so that the attempt needs no repetition.
	handshakeTimeout = 60 * time.Second
	// configureTimeout bounds Ping and Configure after the handshake.
	configureTimeout = 60 * time.Second
	// retryFirst and retryMost bound the pause after a failed attempt.
	retryFirst = 50 * time.Millisecond
	retryMost  = 2 * time.Second
)

// guestLink is how to begin a conversation with the guest agent.
type guestLink struct {
	magic link.Magic
	told  Guest
	log   *slog.Logger
}

// conversation is one HTTP/2 connection to the guest agent over the link. Its
// life: converse makes it; the proxy and the monitor send requests through rt;
// broken is closed when it can carry no more; close ends it.
type conversation struct {
	rt     *http.ClientConn
	agent  agentv1connect.AgentServiceClient
	heard  *atomic.Int64 // unix nanoseconds of the last byte from the guest
	broken chan struct{}
}

// keepLink keeps a conversation with the guest agent of the run until ctx
// ends: while a user has paused the guest a standing one is left alone, and
// none is begun.
func (m *monitor) keepLink(ctx context.Context, run machine.Run) {
	retry := retryFirst
	for ctx.Err() == nil && m.awaitUnpaused(ctx) == nil {
		began := time.Now()
		conv, err := m.guest.converse(ctx, run)
		if err == nil {
			err = m.ready(conv)
		}
		if err == nil {
			err = m.attend(ctx, conv)
		}
		if conv != nil {
			conv.close()
		}
		if ctx.Err() != nil {
			break
		}
		m.Log.Info("no link to the guest agent", "why", err)
		m.update(func() { m.link, m.trouble = nil, err.Error() })
		if time.Since(began) > retryMost {
			retry = retryFirst
		}
		select {
		case <-time.After(retry): // a pause between attempts that fail at once
		case <-ctx.Done():
		}
		retry = min(2*retry, retryMost)
	}
	m.update(func() { m.link = nil })
}

// ready makes the conversation the one that requests go through.
func (m *monitor) ready(conv *conversation) error {
	m.mu.Lock()
	first := m.rec.ReadyUnixNano == 0
	m.mu.Unlock()
	if first {
		err := m.record(func(r *Record) {
			r.ReadyUnixNano = time.Now().UnixNano()
			if r.Phase == Booting {
				r.Phase = Running
			}
		})
		if err != nil {
			return err
		}
	}
	m.update(func() { m.link, m.trouble = conv, "" })
	return nil
}

// attend watches a conversation until it is broken, the guest is silent for
// too long, or ctx ends.
func (m *monitor) attend(ctx context.Context, conv *conversation) error {
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
		case <-conv.broken:
			return errdefs.New(errdefs.WrongState, "the link to the guest agent broke: %w", conv.rt.Err())
		case <-tick.C:
		}
		if m.paused() {
			awake = time.Now()
			continue
		}
		quiet := min(time.Since(awake), time.Since(time.Unix(0, conv.heard.Load())))
		if quiet > quietBeforeGone {
			return errdefs.New(errdefs.WrongState, "the guest agent has been silent for %s", quiet.Round(time.Second))
		}
		if quiet > quietBeforeProbe {
			probes.Go(func() {
				// Its answer is heard as bytes; its failure as their absence.
				_, _ = conv.agent.Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
			})
		}
	}
}

// converse connects to the guest agent, greets it and tells it who it is.
func (g *guestLink) converse(ctx context.Context, run machine.Run) (*conversation, error) {
	greet, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	raw, err := run.DialLink(greet)
	if err != nil {
		return nil, fmt.Errorf("dial agent link: %w", err)
	}
	conn, err := link.Host(greet, raw, g.magic)
	if err != nil {
		return nil, err
	}
	conv, err := newConversation(ctx, conn)
	if err != nil {
		_ = conn.Close() // the error says more
		return nil, err
	}
	if err := g.configure(ctx, conv.agent); err != nil {
		conv.close()
		return nil, err
	}
	return conv, nil
}

// configure tells a guest that was booted since it was last told.
func (g *guestLink) configure(ctx context.Context, agent agentv1connect.AgentServiceClient) error {
	ctx, cancel := context.WithTimeout(ctx, configureTimeout)
	defer cancel()
	pong, err := agent.Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
	if err != nil {
		return fmt.Errorf("ping guest agent: %w", err)
	}
	if pong.Msg.GetConfigured() {
		return nil
	}
	entropy := make([]byte, 64)
	rand.Read(entropy) // never fails: crypto/rand ends the process instead
	_, err = agent.Configure(ctx, connect.NewRequest(&agentv1.ConfigureRequest{
		Hostname: g.told.Hostname, MachineId: g.told.MachineID, OnBoot: g.told.OnBoot, Tmpfs: g.told.Tmpfs,
		UnixNano: time.Now().UnixNano(), Entropy: entropy,
	}))
	if err != nil {
		return fmt.Errorf("configure guest: %w", err)
	}
	return nil
}

// newConversation begins HTTP/2 on a greeted connection, which it owns from
// then on if it gives no error.
func newConversation(ctx context.Context, conn net.Conn) (*conversation, error) {
	conv := &conversation{heard: new(atomic.Int64), broken: make(chan struct{})}
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
	conv.agent = agentv1connect.NewAgentServiceClient(&http.Client{Transport: rt}, "http://guest", plain())
	return conv, nil
}

// close ends the conversation and waits until its connection is let go of.
func (c *conversation) close() {
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

// parseMagic finds the machine's magic in the guest's kernel command line.
func parseMagic(cmdline string) (link.Magic, error) {
	for word := range strings.FieldsSeq(cmdline) {
		if digits, ok := strings.CutPrefix(word, "holdpoint.magic="); ok {
			return link.ParseMagic(digits)
		}
	}
	return link.Magic{}, errdefs.New(errdefs.Invalid, "kernel command line %q: holdpoint.magic=<32 hexadecimal digits> is missing", cmdline)
}
