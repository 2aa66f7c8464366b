package network

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// FuzzFrames: whatever a guest sends, the monitor that ends its network goes on.
func FuzzFrames(f *testing.F) {
	eth := func(kind uint16, packet ...byte) []byte {
		frame := append([]byte(mac(GatewayMAC)), []byte(mac(GuestMAC))...)
		return append(binary.BigEndian.AppendUint16(frame, kind), packet...)
	}
	f.Add(eth(0x0806, 0, 1, 8, 0, 6, 4, 0, 1))
	f.Add(eth(0x0800, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 198, 18, 0, 2, 1, 1, 1, 1, 0x10, 0, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0))
	f.Add(eth(0x0800, 0x45, 0, 0, 28, 0, 0, 0x20, 0, 64, 17, 0, 0, 198, 18, 0, 2, 198, 18, 0, 1, 0x10, 0, 0, 53, 0, 8, 0, 0))
	f.Add(eth(0x86dd, append([]byte{0x60, 0, 0, 0, 0, 8, 58, 255}, make([]byte, 40)...)...))
	f.Fuzz(func(t *testing.T, frame []byte) {
		o := newOutside()
		n := network(t, o, policy.Policy{Mode: policy.Internet})
		device, monitor := pair(t)
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() { _ = n.Serve(ctx, monitor) })
		all.Go(func() { _, _ = io.Copy(io.Discard, device) })
		_, _ = device.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...))
		_ = device.(*net.UnixConn).CloseWrite()
		all.Wait()
		cancel()
		_ = device.Close()
	})
}
