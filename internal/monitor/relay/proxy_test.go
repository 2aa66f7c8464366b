package relay_test

import (
	"context"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// proxied is the guest's agent through a proxy.
func proxied(t *testing.T, g *guest) agentv1connect.AgentServiceClient {
	t.Helper()
	conv := converse(t, g)
	t.Cleanup(conv.Close)
	srv := httptest.NewServer(relay.NewProxy(relay.Proxy{
		Find: func(context.Context) (*relay.Conversation, error) { return conv, nil },
		Gone: func(_ context.Context, _ *relay.Conversation, call string) error {
			return errdefs.New(errdefs.OutcomeUnknown, "gone during %s", call)
		},
	}))
	t.Cleanup(srv.Close)
	return agentv1connect.NewAgentServiceClient(srv.Client(), srv.URL, relay.Plain())
}

// Download sends three messages, and tears the link if the path says so.
func (g *guest) Download(_ context.Context, req *connect.Request[agentv1.DownloadRequest], stream *connect.ServerStream[agentv1.DownloadResponse]) error {
	for range 3 {
		if err := stream.Send(&agentv1.DownloadResponse{Data: make([]byte, 100_000)}); err != nil {
			return err
		}
	}
	if req.Msg.GetPath() == "fail" {
		return connect.NewError(connect.CodeNotFound, context.Canceled)
	}
	if req.Msg.GetPath() == "tear" {
		g.heardAll.Wait()
		_ = g.host.Close()
	}
	return nil
}

func TestProxyEndsStreams(t *testing.T) {
	for path, code := range map[string]connect.Code{"": 0, "fail": connect.CodeNotFound, "tear": connect.CodeUnavailable} {
		t.Run(path, func(t *testing.T) {
			g := newGuest(t)
			g.heardAll.Add(1)
			stream, err := proxied(t, g).Download(t.Context(), connect.NewRequest(&agentv1.DownloadRequest{Path: path}))
			if err != nil {
				t.Fatal(err)
			}
			defer stream.Close()
			n := 0
			for stream.Receive() {
				if n++; n == 3 {
					g.heardAll.Done()
				}
			}
			err = stream.Err()
			if n != 3 || err == nil != (code == 0) || err != nil && connect.CodeOf(err) != code {
				t.Errorf("%d messages, then %v", n, err)
			}
			if path == "tear" && (!errdefs.Is(wire.Decode(err), errdefs.OutcomeUnknown) || wire.Decode(err).Error() != "gone during Download") {
				t.Errorf("error %v", wire.Decode(err))
			}
		})
	}
}

func TestProxyOfATornLink(t *testing.T) {
	g := newGuest(t)
	agent := proxied(t, g)
	if _, err := agent.Ping(t.Context(), connect.NewRequest(&agentv1.PingRequest{})); err != nil {
		t.Fatal(err)
	}
	_ = g.host.Close()
	_, err := agent.Ping(t.Context(), connect.NewRequest(&agentv1.PingRequest{}))
	if connect.CodeOf(err) != connect.CodeUnavailable || wire.Decode(err).Error() != "gone during Ping" {
		t.Errorf("ping: %v", err)
	}
}

// ListCommands answers with more than the proxy takes at first.
func (g *guest) ListCommands(context.Context, *connect.Request[agentv1.ListCommandsRequest]) (*connect.Response[agentv1.ListCommandsResponse], error) {
	res := &agentv1.ListCommandsResponse{}
	for _, size := range g.answers {
		res.Commands = append(res.Commands, &agentv1.Command{Id: strings.Repeat("x", size)})
	}
	return connect.NewResponse(res), nil
}

// Answers of one message come whole, whatever their size: below, at and above
// that of the first buffer, and of the second.
func TestProxyOfLargeAnswers(t *testing.T) {
	const head = 4 // bytes of tags and lengths around one id of this size
	for _, size := range []int{100, 32<<10 - 2*head, 32<<10 - 2*head + 1, 32<<10 - 2*head - 1, 100 << 10, 6 << 20} {
		g := newGuest(t)
		g.answers = []int{size}
		res, err := proxied(t, g).ListCommands(t.Context(), connect.NewRequest(&agentv1.ListCommandsRequest{}))
		if err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if c := res.Msg.GetCommands(); len(c) != 1 || len(c[0].GetId()) != size {
			t.Errorf("%d bytes: another answer", size)
		}
	}
}
