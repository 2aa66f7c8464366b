//go:build linux

package agent

import (
	"context"
	"io"
	"net"
	"strconv"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/link"
	"github.com/holdpoint/holdpoint/internal/tarstream"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// Upload unpacks a tar stream. What it unpacks belongs to root, as with other
// container tools; set-user-ID bits are dropped.
func (a *Agent) Upload(ctx context.Context, stream *connect.ClientStream[agentv1.UploadRequest]) (*connect.Response[agentv1.UploadResponse], error) {
	if err := a.ready(); err != nil {
		return nil, wire.Encode(err)
	}
	if !stream.Receive() {
		return nil, wire.Encode(streamError(stream.Err()))
	}
	start := stream.Msg().GetStart()
	if start == nil {
		return nil, wire.Encode(errdefs.New(errdefs.Invalid, "upload: the first message must be start"))
	}
	name, err := a.path(start.GetPath())
	if err != nil {
		return nil, wire.Encode(err)
	}
	unpack := tarstream.Unpack
	if start.GetRename() {
		unpack = tarstream.UnpackAs
	}
	call, err := bulkOf(ctx)
	if err != nil {
		return nil, err
	}
	in := newBulkReader(call, 2)
	res, err := unpack(ctx, in, name, tarstream.Options{Special: a.cfg.Init, Direct: a.cfg.Init})
	if err == nil {
		_, err = io.Copy(io.Discard, in) // the padding of the archive
	}
	if err != nil {
		return nil, wire.Encode(err)
	}
	return connect.NewResponse(&agentv1.UploadResponse{Files: res.Files, Bytes: res.Bytes}), nil
}

func streamError(err error) error {
	if err == nil {
		return errdefs.New(errdefs.Invalid, "upload: the stream ended before its first message")
	}
	return err
}

// Download packs a path as a tar stream.
func (a *Agent) Download(ctx context.Context, req *connect.Request[agentv1.DownloadRequest], _ *connect.ServerStream[agentv1.DownloadResponse]) error {
	if err := a.ready(); err != nil {
		return wire.Encode(err)
	}
	name, err := a.path(req.Msg.GetPath())
	if err != nil {
		return wire.Encode(err)
	}
	call, err := bulkOf(ctx)
	if err != nil {
		return err
	}
	return wire.Encode(tarstream.PackDirect(ctx, bulkWriter{call.out, 1}, name))
}

type dialStream = connect.BidiStream[agentv1.DialRequest, agentv1.DialResponse]

// dialTimeout bounds a connection on the loopback, where an answer is sure to
// come unless a backlog is full.
const dialTimeout = 10 * time.Second

// Dial connects to a port on the loopback, IPv4 first, and carries its bytes.
// The stream ends when the connection's other side has sent its last byte, or,
// where half closes were asked for, when both have; a reset is an error.
func (a *Agent) Dial(ctx context.Context, stream *dialStream) error {
	if err := a.ready(); err != nil {
		return wire.Encode(err)
	}
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	conn, err := dialLoopback(ctx, first.GetPort())
	if err != nil {
		return wire.Encode(err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer func() { stop(); _ = conn.Close() }()
	if err := stream.Send(&agentv1.DialResponse{Message: &agentv1.DialResponse_Connected{Connected: &agentv1.DialEnd{}}}); err != nil {
		return err
	}
	said := make(chan struct{})
	a.streams.Go(func() {
		defer close(said)
		carryTo(conn, stream)
	})
	if err := carryFrom(conn, stream); err != nil || !first.GetHalfClose() {
		return wire.Encode(err)
	}
	if err := stream.Send(&agentv1.DialResponse{Message: &agentv1.DialResponse_End{End: &agentv1.DialEnd{}}}); err != nil {
		return err
	}
	<-said
	return nil
}

func dialLoopback(ctx context.Context, port uint32) (*net.TCPConn, error) {
	if port < 1 || port > 65535 {
		return nil, errdefs.New(errdefs.Invalid, "dial port %d: use 1 to 65535", port)
	}
	d := net.Dialer{Timeout: dialTimeout}
	var first error
	for _, host := range []string{"127.0.0.1", "::1"} {
		conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port))))
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, errdefs.New(errdefs.NotFound, "dial port %d in the machine: nothing answers there: %w", port, first)
}

// carryTo carries requests to the connection; their end closes that half.
func carryTo(conn *net.TCPConn, stream *dialStream) {
	for {
		m, err := stream.Receive()
		if err != nil || m.GetEnd() != nil {
			_ = conn.CloseWrite() // if the stream broke, the handler closes all of it
			return
		}
		if _, err := conn.Write(m.GetData()); err != nil {
			return // carryFrom learns why
		}
	}
}

// carryFrom carries what the connection says.
func carryFrom(conn *net.TCPConn, stream *dialStream) error {
	var buffer link.Buffer
	for {
		piece, err := buffer.Read(conn)
		if len(piece) > 0 {
			if serr := stream.Send(&agentv1.DialResponse{Message: &agentv1.DialResponse_Data{Data: piece}}); serr != nil {
				return serr
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
