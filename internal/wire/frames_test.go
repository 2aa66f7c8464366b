package wire_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// source sends pieces of these sizes, then ends as path says.
type source struct {
	agentv1connect.UnimplementedAgentServiceHandler
}

var errTorn = errors.New("torn")

func pieces() []int { return []int{0, 1, 4 << 10, 3 << 20, 10} }

func (source) Download(_ context.Context, req *connect.Request[agentv1.DownloadRequest], out *connect.ServerStream[agentv1.DownloadResponse]) error {
	for i, size := range pieces() {
		if err := out.Send(&agentv1.DownloadResponse{Data: bytes.Repeat([]byte{byte(i)}, size)}); err != nil {
			return err
		}
	}
	switch req.Msg.GetPath() {
	case "missing":
		return wire.Encode(errdefs.New(errdefs.NotFound, "it is not there"))
	case "torn":
		panic(http.ErrAbortHandler)
	}
	return nil
}

// between passes a download on as frames.
type between struct {
	agentv1connect.UnimplementedAgentServiceHandler
	from agentv1connect.AgentServiceClient
	t    *testing.T
}

func (b between) Download(ctx context.Context, req *connect.Request[agentv1.DownloadRequest], _ *connect.ServerStream[agentv1.DownloadResponse]) error {
	send := wire.SendFrame(ctx)
	if send == nil {
		return errdefs.New(errdefs.Unsupported, "no frames")
	}
	stream, err := b.from.Download(wire.WithFrames(ctx, send), connect.NewRequest(req.Msg))
	if err != nil {
		return err
	}
	defer stream.Close()
	for stream.Receive() {
		b.t.Error("Connect got a message that was to be passed on")
	}
	return stream.Err()
}

func agentAt(t *testing.T, h http.Handler) agentv1connect.AgentServiceClient {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return agentv1connect.NewAgentServiceClient(&http.Client{Transport: wire.FrameTransport(srv.Client().Transport)}, srv.URL,
		connect.WithAcceptCompression("gzip", nil, nil)) // what is compressed is Connect's
}

// Messages that pass by arrive as they were sent; the end of their stream, with
// what is wrong, is Connect's.
func TestFramesPassBy(t *testing.T) {
	_, near := agentv1connect.NewAgentServiceHandler(source{})
	_, far := agentv1connect.NewAgentServiceHandler(between{from: agentAt(t, near), t: t})
	agent := agentAt(t, wire.KeepWriter(far))
	for path, kind := range map[string]errdefs.Kind{"": "", "missing": errdefs.NotFound, "torn": errdefs.Internal} {
		stream, err := agent.Download(t.Context(), connect.NewRequest(&agentv1.DownloadRequest{Path: path}))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for ; stream.Receive(); n++ {
			if want := bytes.Repeat([]byte{byte(n)}, pieces()[n]); !bytes.Equal(stream.Msg().GetData(), want) {
				t.Errorf("%q: message %d is another", path, n)
			}
		}
		err = wire.Decode(stream.Err())
		if n != len(pieces()) || err == nil != (kind == "") || err != nil && errdefs.KindOf(err) != kind && path != "torn" {
			t.Errorf("%q: %d messages, then %v", path, n, err)
		}
		_ = stream.Close()
	}
}

// A receiver of frames that fails ends the stream with its error.
func TestFramesRefused(t *testing.T) {
	_, near := agentv1connect.NewAgentServiceHandler(source{})
	agent := agentAt(t, near)
	taken := 0
	ctx := wire.WithFrames(t.Context(), func([]byte) error {
		if taken++; taken == 2 {
			return errTorn
		}
		return nil
	})
	stream, err := agent.Download(ctx, connect.NewRequest(&agentv1.DownloadRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if stream.Receive() || !errors.Is(stream.Err(), errTorn) || taken != 2 {
		t.Errorf("%d frames, then %v", taken, stream.Err())
	}
}

// Another protocol, and a handler outside KeepWriter, have no frames.
func TestNoFrames(t *testing.T) {
	if wire.SendFrame(t.Context()) != nil {
		t.Error("a context without a writer sends frames")
	}
}
