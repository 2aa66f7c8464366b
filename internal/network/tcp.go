package network

import (
	"context"
	"errors"
	"io"
	"net"

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
	largeBuffer = 256 << 10
)

// forwardTCP is called, in a goroutine of its own, for each connection that the
// guest begins. The guest's is only accepted once the one outside is there, and
// is otherwise reset: the guest sees a refusal as one, and at once.
func (s *session) forwardTCP(r *tcp.ForwarderRequest) {
	id := r.ID()
	to := destination(id)
	if !s.allowed(policy.TCP, id) {
		r.Complete(true)
		return
	}
	if !s.enter(&s.tcp, s.limits.tcp) {
		s.refusals.add(policy.TCP, to.String(), policy.Limit)
		r.Complete(true)
		return
	}
	defer s.leave(&s.tcp)
	if isDNS(to) {
		if guest, ep := s.accept(r); guest != nil {
			defer context.AfterFunc(s.ctx, ep.Abort)()
			s.names.ServeStream(s.ctx, guest)
		}
		return
	}
	outside, err := s.dial(policy.TCP, to)
	if err != nil {
		r.Complete(true)
		return
	}
	guest, ep := s.accept(r)
	if guest == nil {
		reset(outside)
		return
	}
	relay(s.ctx, guest, ep, outside)
}

// accept shakes hands with the guest; nil if the guest does not.
func (s *session) accept(r *tcp.ForwarderRequest) (*gonet.TCPConn, tcpip.Endpoint) {
	var queue waiter.Queue
	ep, err := r.CreateEndpoint(&queue)
	r.Complete(err != nil)
	if err != nil {
		return nil, nil
	}
	return gonet.NewTCPConn(&queue, ep), ep
}

// relay carries both directions, each until its own end, and closes both sides. What
// ends one side by an error ends the other by a reset.
func relay(ctx context.Context, guest *gonet.TCPConn, ep tcpip.Endpoint, outside net.Conn) {
	abort := func() {
		ep.Abort()
		reset(outside)
	}
	stop := context.AfterFunc(ctx, abort)
	up := make(chan struct{})
	go func() {
		defer close(up)
		if copyHalf(outside, guest) != nil {
			abort()
		}
	}()
	if copyHalf(guest, outside) != nil {
		abort()
	}
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
func copyHalf(dst io.Writer, src io.Reader) error {
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
		case n == len(buf) && n < largeBuffer:
			buf = make([]byte, min(4*n, largeBuffer))
		}
	}
}
