// Package client talks to the holdpoint daemon over its unix socket: typed
// Connect clients for every service, errors with kinds, and waiting for
// operations. It neither starts a daemon nor holds any policy; the command
// line does.
package client

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"net"
	"net/http"

	"connectrpc.com/connect"

	"github.com/holdpoint/holdpoint/api/holdpoint/v1/holdpointv1connect"
	"github.com/holdpoint/holdpoint/internal/home"
)

// Options say which daemon to talk to.
type Options struct {
	// Socket is the path of the daemon's socket. It comes before Home.
	Socket string
	// Home is the daemon's home; empty means $HOLDPOINT_HOME or the user's
	// default home.
	Home string
	// Reconnect is called before WaitOperation asks a daemon again that went
	// away; it may start one. Nil only waits a little.
	Reconnect func(ctx context.Context) error
}

// Client is a connection to one daemon. Its services may be used from many
// goroutines at once. Errors of all of them are decoded: KindOf tells them
// apart.
type Client struct {
	Daemon      holdpointv1connect.DaemonServiceClient
	Images      holdpointv1connect.ImageServiceClient
	Machines    holdpointv1connect.MachineServiceClient
	Guest       holdpointv1connect.GuestServiceClient
	Checkpoints holdpointv1connect.CheckpointServiceClient
	Routes      holdpointv1connect.RouteServiceClient
	Operations  holdpointv1connect.OperationServiceClient

	socket    string
	reconnect func(ctx context.Context) error
	calls     *http.Transport
	streams   *http.Transport
}

// Dial makes a client. It connects at the first call, so that it fails only
// for a home that cannot be; Close ends its connections.
func Dial(_ context.Context, opts Options) (*Client, error) {
	socket := opts.Socket
	if socket == "" {
		var err error
		if socket, err = socketOf(opts.Home); err != nil {
			return nil, err
		}
	}
	c := &Client{socket: socket, reconnect: opts.Reconnect}
	c.calls = transport(socket, false)
	// Exec and Dial speak in both directions at once, which HTTP/1.1 cannot;
	// all other calls are a little faster without HTTP/2's set-up.
	c.streams = transport(socket, true)
	c.services()
	return c, nil
}

// Socket is the path of the daemon's socket.
func (c *Client) Socket() string { return c.socket }

// Close ends the client's idle connections; calls under way go on. Operations
// are never ended by it.
func (c *Client) Close() {
	c.calls.CloseIdleConnections()
	c.streams.CloseIdleConnections()
}

// NewRequestID makes a request id. The same id given twice with the same
// options has its effect once.
func NewRequestID() string {
	var b [12]byte
	// crypto/rand.Read never fails (its documentation, since Go 1.24).
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func (c *Client) services() {
	const base = "http://holdpoint"
	opts := []connect.ClientOption{
		connect.WithInterceptors(decoder{socket: c.socket}),
		// Compression costs more than it saves on a unix socket.
		connect.WithAcceptCompression("gzip", nil, nil),
	}
	calls, guest := &http.Client{Transport: c.calls}, &http.Client{Transport: byCall{c}}
	c.Daemon = holdpointv1connect.NewDaemonServiceClient(calls, base, opts...)
	c.Images = holdpointv1connect.NewImageServiceClient(calls, base, opts...)
	c.Machines = holdpointv1connect.NewMachineServiceClient(calls, base, opts...)
	c.Guest = holdpointv1connect.NewGuestServiceClient(guest, base, opts...)
	c.Checkpoints = holdpointv1connect.NewCheckpointServiceClient(calls, base, opts...)
	c.Routes = holdpointv1connect.NewRouteServiceClient(calls, base, opts...)
	c.Operations = holdpointv1connect.NewOperationServiceClient(calls, base, opts...)
}

// byCall sends each call of the guest service by the protocol that suits it.
// HTTP/2 keeps what it reads in a buffer of its own, one copy more of every
// byte of a download, which goes one way only.
type byCall struct{ client *Client }

// RoundTrip is that of http.RoundTripper.
func (t byCall) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Path == holdpointv1connect.GuestServiceDownloadProcedure {
		return t.client.calls.RoundTrip(r)
	}
	return t.client.streams.RoundTrip(r)
}

func socketOf(dir string) (string, error) {
	if dir == "" {
		var err error
		if dir, err = home.Default(); err != nil {
			return "", err
		}
	}
	h, err := home.Open(dir)
	if err != nil {
		return "", err
	}
	return h.Socket(), nil
}

func transport(socket string, http2 bool) *http.Transport {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		DisableCompression: true,
		Protocols:          new(http.Protocols),
		// A message of bulk is one frame then, and one read.
		HTTP2: &http.HTTP2Config{MaxReadFrameSize: 4 << 20},
	}
	t.Protocols.SetHTTP1(!http2)
	t.Protocols.SetUnencryptedHTTP2(http2)
	return t
}
