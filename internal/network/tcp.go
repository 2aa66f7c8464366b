package network

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// A copy begins with a small buffer, since most connections are idle most of
// the time, and a thousand of them are held; what fills it gets a larger one.
const (
	smallBuffer = 4 << 10
	// A connection of many gets less memory than one of few: room is what it may
	// have unread in each direction, in bytes. 4096 of them, all full, take 0.5 GiB.
	fewTCP, fewRoom   = 32, 1 << 20
	someTCP, someRoom = 256, 256 << 10
	manyRoom          = 32 << 10
)

// room is that of the n-th connection that there is at the same time.
func room(n int) int {
	switch {
	case n <= fewTCP:
		return fewRoom
	case n <= someTCP:
		return someRoom
	}
	return manyRoom
}

// keepInterval lies between two questions to a guest that has said its last word and
// does not answer.
const keepInterval = 75 * time.Second

// forwardTCP is called, in a goroutine of its own, for each connection that the
// guest begins. The guest's is only accepted once the one outside is there, and
// is otherwise reset: the guest sees a refusal as one, and at once.
func (s *session) forwardTCP(r *tcp.ForwarderRequest) {
	id := r.ID()
	to := destination(id)
	seq, known, forget := s.notedSYN(id)
	defer forget()
	if !s.allowed(policy.TCP, id) {
		r.Complete(true)
		return
	}
	n, ok := s.enter(&s.tcp, s.limits.tcp)
	if !ok {
		s.refusals.add(policy.TCP, to.String(), policy.Limit, "")
		r.Complete(true)
		return
	}
	defer s.leave(&s.tcp)
	if isDNS(to) {
		if guest := s.accept(r, manyRoom); guest != nil {
			forget()
			defer context.AfterFunc(s.ctx, guest.ep.Abort)()
			s.names.ServeStream(s.ctx, guest)
		}
		return
	}
	outside, err := s.dial(policy.TCP, to)
	if err != nil {
		why, unreachable := unreachableBy(err)
		unreachable = unreachable && known && why != portUnreachable
		// What nobody has answered is not answered: the guest asks again, and
		// gives up when its own patience ends.
		r.Complete(!unreachable && !isTimeout(err))
		if unreachable {
			s.tellUnreachable(tcp.ProtocolNumber, id, seq, why)
		}
		return
	}
	guest := s.accept(r, room(n))
	if guest == nil {
		reset(outside)
		return
	}
	forget()
	s.relay(guest, outside, room(n)/4)
}

// guestConn is the guest's side of a connection.
type guestConn struct {
	*gonet.TCPConn
	ep    tcpip.Endpoint
	queue *waiter.Queue
}

// isTimeout tells the silence of the other side.
func isTimeout(err error) bool {
	var n net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &n) && n.Timeout()
}

// accept shakes hands with the guest; nil if the guest does not.
func (s *session) accept(r *tcp.ForwarderRequest, room int) *guestConn {
	queue := new(waiter.Queue)
	ep, err := r.CreateEndpoint(queue)
	r.Complete(err != nil)
	if err != nil {
		return nil
	}
	options := ep.SocketOptions()
	options.SetReceiveBufferSize(int64(room), true)
	options.SetSendBufferSize(int64(room), true)
	return &guestConn{gonet.NewTCPConn(queue, ep), ep, queue}
}

// gone is closed when a guest that has said its last word does not know the connection
// any more: its kernel forgets one that nobody has open after a minute, silently.
func (c *guestConn) gone(idle time.Duration) (gone <-chan struct{}, stop func()) {
	entry, notify := waiter.NewChannelEntry(waiter.EventHUp | waiter.EventErr)
	c.queue.EventRegister(&entry)
	after, interval := tcpip.KeepaliveIdleOption(idle), tcpip.KeepaliveIntervalOption(keepInterval)
	_, _ = c.ep.SetSockOpt(&after), c.ep.SetSockOpt(&interval) // both always can be
	c.ep.SocketOptions().SetKeepAlive(true)
	return notify, func() { c.queue.EventUnregister(&entry) }
}

// relay carries both directions, each until its own end, and closes both sides. What
// ends one side by an error ends the other by a reset.
func (s *session) relay(guest *guestConn, outside net.Conn, largest int) {
	abort := func() {
		guest.ep.Abort()
		reset(outside)
	}
	stop := context.AfterFunc(s.ctx, abort)
	up, down := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(up)
		if copyHalf(outside, guest, largest) != nil {
			abort()
			return
		}
		gone, unwatch := guest.gone(s.limits.keep)
		defer unwatch()
		select {
		case <-gone:
			abort()
		case <-down:
		}
	}()
	if copyHalf(guest, outside, largest) != nil {
		abort()
	}
	close(down)
	<-up
	if stop() {
		_ = guest.Close()
		_ = outside.Close()
	}
}

// reset ends the connection without a word.
func reset(outside net.Conn) {
	if c, ok := outside.(*net.TCPConn); ok {
		_ = c.SetLinger(0)
	}
	_ = outside.Close()
}

// copyHalf copies until src ends, and then ends that direction of dst.
func copyHalf(dst io.Writer, src io.Reader, largest int) error {
	buf := make([]byte, smallBuffer)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			if half, ok := dst.(interface{ CloseWrite() error }); ok {
				return half.CloseWrite()
			}
			return nil
		case err != nil:
			return err
		case n == len(buf) && n < largest:
			buf = make([]byte, min(4*n, largest))
		}
	}
}
