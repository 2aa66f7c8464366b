package network

import (
	"bytes"
	"context"
	"net"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// maxDatagram is the most that a datagram carries.
const maxDatagram = 65535

// admitUDP decides on a datagram of no flow that there is; the one that is
// admitted begins one.
func (s *session) admitUDP(id stack.TransportEndpointID) bool {
	if !s.allowed(policy.UDP, id) {
		return false
	}
	if _, ok := s.enter(&s.udp, s.limits.udp); !ok {
		s.refusals.add(policy.UDP, destination(id).String(), policy.Limit, "")
		return false
	}
	return true
}

// forwardUDP begins the flow that admitUDP has counted.
func (s *session) forwardUDP(r *udp.ForwarderRequest) {
	f := &flow{session: s}
	ep, err := r.CreateEndpoint(&f.queue)
	if err != nil { // another datagram of it has just done so
		s.leave(&s.udp)
		return
	}
	f.ep, f.id = ep, r.ID()
	to := destination(f.id)
	go func() {
		defer s.leave(&s.udp)
		defer ep.Close()
		if isDNS(to) {
			f.serveNames()
			return
		}
		outside, err := s.dial(policy.UDP, to)
		if err != nil {
			f.lost(err)
			return
		}
		f.relay(outside)
	}()
}

// flow is what one port of the guest's sends to one destination.
type flow struct {
	*session
	id    stack.TransportEndpointID
	ep    tcpip.Endpoint
	queue waiter.Queue
}

// read waits for a datagram of the guest's; ok is false when ctx has ended. The
// datagram is the caller's.
func (f *flow) read(ctx context.Context) (datagram []byte, ok bool) {
	entry, notify := waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventHUp)
	f.queue.EventRegister(&entry)
	defer f.queue.EventUnregister(&entry)
	for {
		var b bytes.Buffer
		_, err := f.ep.Read(&b, tcpip.ReadOptions{})
		if err == nil {
			return b.Bytes(), true
		}
		if _, wait := err.(*tcpip.ErrWouldBlock); !wait {
			return nil, false
		}
		select {
		case <-notify:
		case <-ctx.Done():
			return nil, false
		}
	}
}

// write sends the datagram to the guest; one that finds no room is lost.
func (f *flow) write(datagram []byte) {
	_, _ = f.ep.Write(bytes.NewReader(datagram), tcpip.WriteOptions{})
}

// lost tells the guest that its datagrams do not arrive, where that is the error.
func (f *flow) lost(err error) (told bool) {
	why, told := unreachableBy(err)
	if told {
		f.tellUnreachable(udp.ProtocolNumber, f.id, 0, why)
	}
	return told
}

// relay carries datagrams until none has passed for the idle limit, or none arrives.
func (f *flow) relay(outside net.Conn) {
	ctx, cancel := context.WithCancel(f.ctx)
	idle := time.AfterFunc(f.limits.idle, cancel)
	defer idle.Stop()
	defer context.AfterFunc(ctx, func() { _ = outside.Close() })()
	var down sync.WaitGroup
	down.Go(func() {
		defer cancel()
		err := f.datagrams(outside, func(d []byte) {
			idle.Reset(f.limits.idle)
			f.write(d)
		})
		f.lost(err)
	})
	for {
		d, ok := f.read(ctx)
		if !ok {
			break
		}
		idle.Reset(f.limits.idle)
		if _, err := outside.Write(d); err != nil && f.lost(err) {
			break // another one, such as of a datagram that is too long, is about that one
		}
	}
	cancel()
	_ = outside.Close()
	down.Wait()
}

// serveNames answers DNS queries, several at the same time: a client asks for both kinds
// of addresses at once.
func (f *flow) serveNames() {
	var answers sync.WaitGroup
	defer answers.Wait()
	for {
		ctx, cancel := context.WithTimeout(f.ctx, f.limits.idle)
		query, ok := f.read(ctx)
		cancel()
		if !ok {
			return
		}
		answers.Go(func() {
			if answer := f.names.Answer(f.ctx, query, policy.UDP); answer != nil {
				f.write(answer)
			}
		})
	}
}
