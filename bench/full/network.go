//go:build linux

package full

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/peer"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/bench/talk"
	"github.com/holdpoint/holdpoint/internal/network"
)

// How much goes over the network at a time, and how much slower than QEMU's own
// user network that may be.
const (
	networkRounds = 7
	networkBytes  = 32 << 20
	networkRatio  = 0.7
)

// Network compares what a guest gets from a server on the host, and sends to it,
// with the same guest on QEMU's own user network.
func (b *Bench) Network(ctx context.Context) (err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	var serving sync.WaitGroup
	serving.Go(func() { serveTransfers(l) })
	defer serving.Wait()
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	spec := &holdpointv1.Spec{NetworkAllowHost: []uint32{uint32(port)}}
	m, ours, err := b.machineOf(ctx, busyName, spec, 0, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stage.Remove(ctx, busyName)) }()
	p, theirs, err := b.peer(ctx, m, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	at := func(load talk.Load, verb, host string) func() (time.Duration, error) {
		line := fmt.Sprintf("%s %d %s", verb, networkBytes, netip.AddrPortFrom(netip.MustParseAddr(host), port))
		return func() (time.Duration, error) {
			answer, err := load.Ask(line)
			if err != nil {
				return 0, err
			}
			ns, err := strconv.ParseInt(answer, 10, 64)
			return time.Duration(ns), err
		}
	}
	for _, d := range []struct{ what, verb string }{{"from a server outside into", "pull"}, {"to a server outside from", "push"}} {
		mine, other, err := table.InTurns(networkRounds, at(ours, d.verb, network.Gateway4), at(theirs, d.verb, peer.HostAddress))
		if err != nil {
			return err
		}
		r := table.Ratio(other, mine)
		b.table.Add(table.Row{
			What: "network, TCP " + d.what + " a guest", Measured: table.Rate(networkBytes, mine),
			Against: "QEMU's own user network: " + table.Rate(networkBytes, other), Ratio: r,
			Target: fmt.Sprintf("≥ %.1f ×", networkRatio), Met: r >= networkRatio,
		})
	}
	return nil
}

// serveTransfers is the server that bench/load gets from and sends to, until l ends.
func serveTransfers(l net.Listener) {
	var all sync.WaitGroup
	defer all.Wait()
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		all.Go(func() {
			defer conn.Close()
			_ = serveTransfer(conn) // the load says what it did not get
		})
	}
}

func serveTransfer(conn net.Conn) error {
	var head [9]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return err
	}
	left := int64(binary.BigEndian.Uint64(head[1:]))
	buffer := make([]byte, 256<<10)
	if head[0] == 'u' {
		// Read and not spliced away: both sides of the comparison pay the same.
		if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.LimitReader(conn, left), buffer); err != nil {
			return err
		}
		_, err := conn.Write([]byte{1})
		return err
	}
	for left > 0 {
		n, err := conn.Write(buffer[:min(left, int64(len(buffer)))])
		if err != nil {
			return err
		}
		left -= int64(n)
	}
	return nil
}
