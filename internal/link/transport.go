package link

import (
	"context"
	"net"
	"net/http"
	"sync/atomic"
)

// HTTP2 is how both ends tune HTTP/2 to the link. A round trip takes
// milliseconds, so the windows are large; one write of 256 KiB moves five
// times as many bytes a second as writes of 4 KiB, so frames may be large.
func HTTP2() *http.HTTP2Config {
	return &http.HTTP2Config{
		MaxConcurrentStreams:          1000,
		MaxReadFrameSize:              1 << 20,
		MaxReceiveBufferPerStream:     4 << 20,
		MaxReceiveBufferPerConnection: 16 << 20,
	}
}

// NewTransport returns a client of the guest over one conversation, which it
// owns: CloseIdleConnections and the end of the conversation close it, and
// later requests fail. Requests are HTTP/2 with prior knowledge; the host in
// their URLs is not looked at. The caller may change the transport's HTTP2
// field before the first request, for pings.
func NewTransport(conversation net.Conn) *http.Transport {
	var taken atomic.Bool
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Transport{
		Protocols:          protocols,
		HTTP2:              HTTP2(),
		DisableCompression: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			if taken.Swap(true) {
				return nil, net.ErrClosed
			}
			return conversation, nil
		},
	}
}
