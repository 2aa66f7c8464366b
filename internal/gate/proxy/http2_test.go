package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// serveH2C is serveHTTP for a server that speaks HTTP/2 only, or too.
func serveH2C(t testing.TB, h http.Handler, both bool) string {
	t.Helper()
	l := listenTCP(t)
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	protocols.SetHTTP1(both)
	s := &http.Server{Handler: h, Protocols: protocols, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() {
		_ = s.Close()
		<-done
	})
	return l.Addr().String()
}

// h2c is a client of the proxy that speaks HTTP/2 with prior knowledge.
func h2c(t testing.TB, f *fixture) *http.Client {
	t.Helper()
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	tr := &http.Transport{
		Protocols: protocols, DisableCompression: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", f.proxy.Addr())
		},
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// ask sends a request to app.localhost.
func ask(t testing.TB, c *http.Client, method string, body io.Reader) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest(method, "http://app.localhost/some/path?q=1", body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// proto answers with the protocol that the machine's server was asked in.
func proto(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	_, _ = fmt.Fprintf(w, "%s %s %s %s", r.Method, r.Proto, r.Host, b)
}

// rawServer answers each connection with the same bytes, whatever it is asked.
func rawServer(t testing.TB, answer string) string {
	return serveTCP(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(in)
			if err != nil {
				_, _ = io.WriteString(c, "HTTP/1.0 400 Bad Request\r\n\r\n")
				return
			}
			_, _ = io.Copy(io.Discard, req.Body)
			if req.ProtoMajor == 2 {
				_, _ = io.WriteString(c, "HTTP/1.1 505 No\r\nContent-Length: 0\r\n\r\n")
				return
			}
			if _, err := io.WriteString(c, answer); err != nil || !strings.Contains(answer, "HTTP/1.1") {
				return
			}
		}
	})
}

// TestProtocols is what each kind of server is asked in for each kind of client.
func TestProtocols(t *testing.T) {
	const plain = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain"
	servers := map[string]struct {
		start      func(t *testing.T) string
		old, prior string
	}{
		"both": {
			func(t *testing.T) string { return serveH2C(t, http.HandlerFunc(proto), true) },
			"%s HTTP/1.1 app.localhost data", "%s HTTP/2.0 app.localhost data",
		},
		"HTTP/1.1 of Go": {
			func(t *testing.T) string { return serveHTTP(t, proto) },
			"%s HTTP/1.1 app.localhost data", "%s HTTP/1.1 app.localhost data",
		},
		"HTTP/1.1": {func(t *testing.T) string { return rawServer(t, plain) }, "plain", "plain"},
		"HTTP/1.0": {func(t *testing.T) string { return rawServer(t, "HTTP/1.0 200 OK\r\n\r\nold") }, "old", "old"},
		"chunked": {func(t *testing.T) string {
			return rawServer(t, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
		}, "onetwo", "onetwo"},
		"closes at HTTP/2": {func(t *testing.T) string {
			return serveTCP(t, func(c net.Conn) {
				in := bufio.NewReader(c)
				if b, _ := in.Peek(3); string(b) == "PRI" {
					return
				}
				if req, err := http.ReadRequest(in); err == nil {
					_, _ = io.Copy(io.Discard, req.Body)
					_, _ = io.WriteString(c, plain)
				}
			})
		}, "plain", "plain"},
	}
	for name, s := range servers {
		t.Run(name, func(t *testing.T) {
			f := start(t)
			f.publish("app.localhost", web(), s.start(t))
			for range 3 {
				for _, method := range []string{"PUT", "POST"} {
					for client, want := range map[*http.Client]string{f.client: s.old, h2c(t, f): s.prior} {
						if strings.Contains(want, "%s") {
							want = fmt.Sprintf(want, method)
						}
						req, _ := http.NewRequest(method, "http://app.localhost/", strings.NewReader("data"))
						resp, err := client.Do(req)
						if err != nil {
							t.Fatal(err)
						}
						b, err := io.ReadAll(resp.Body)
						_ = resp.Body.Close()
						if err != nil || resp.StatusCode != 200 || string(b) != want {
							t.Errorf("%s: %d %q, %v, want %q", method, resp.StatusCode, b, err, want)
						}
					}
				}
			}
		})
	}
}

// TestAServerOfHTTP1IsRemembered: it is tried once, and again when what was
// there is another one.
func TestAServerOfHTTP1IsRemembered(t *testing.T) {
	f := start(t)
	client := h2c(t, f)
	f.publish("app.localhost", web(), serveHTTP(t, proto))
	for range 5 {
		if _, got := ask(t, client, "GET", nil); got != "GET HTTP/1.1 app.localhost " {
			t.Fatalf("%q", got)
		}
	}
	if n := f.dialCount(web()); n != 2 {
		t.Errorf("%d connections, want one that asked and one that is kept", n)
	}
	restored := web()
	restored.Generation++
	f.publish("app.localhost", restored, serveH2C(t, http.HandlerFunc(proto), false))
	for range 5 {
		if _, got := ask(t, client, "GET", nil); got != "GET HTTP/2.0 app.localhost " {
			t.Fatalf("%q", got)
		}
	}
	if n := f.dialCount(restored); n != 2 {
		t.Errorf("%d connections of HTTP/2, want one that asked and one that is kept", n)
	}
}

func TestManyAtOnceBeforeTheServerIsKnown(t *testing.T) {
	for name, both := range map[string]func(t *testing.T) string{
		"HTTP/1": func(t *testing.T) string { return serveHTTP(t, proto) },
		"HTTP/2": func(t *testing.T) string { return serveH2C(t, http.HandlerFunc(proto), true) },
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t)
			f.publish("app.localhost", web(), both(t))
			client := h2c(t, f)
			var wg sync.WaitGroup
			for i := range 100 {
				wg.Go(func() {
					body := fmt.Sprintf("body %d", i)
					want := "POST " + name + ".0 app.localhost " + body
					if name == "HTTP/1" {
						want = "POST HTTP/1.1 app.localhost " + body
					}
					if resp, got := ask(t, client, "POST", strings.NewReader(body)); resp.StatusCode != 200 || got != want {
						t.Errorf("%d %q, want %q", resp.StatusCode, got, want)
					}
				})
			}
			wg.Wait()
		})
	}
}

func TestTrailersBothWays(t *testing.T) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Announced")
		_, _ = io.Copy(w, r.Body)
		w.Header().Set("X-Announced", r.Trailer.Get("X-Sum"))
		w.Header().Set(http.TrailerPrefix+"X-Late", "late")
	})
	for name, server := range map[string]string{"HTTP/1": serveHTTP(t, handler), "HTTP/2": serveH2C(t, handler, false)} {
		f := start(t)
		f.publish("app.localhost", web(), server)
		clients := map[string]*http.Client{"HTTP/2": h2c(t, f)}
		if name == "HTTP/1" {
			clients["HTTP/1"] = f.client
		}
		for from, client := range clients {
			req, _ := http.NewRequest("POST", "http://app.localhost/", struct{ io.Reader }{strings.NewReader("body")})
			req.Trailer = http.Header{"X-Sum": {"sum"}}
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if err != nil || string(b) != "body" || resp.Trailer.Get("X-Announced") != "sum" || resp.Trailer.Get("X-Late") != "late" {
				t.Errorf("from %s to %s: %q, %v, trailers %v", from, name, b, err, resp.Trailer)
			}
		}
	}
}

// caller is a service of gRPC.
type caller struct {
	agentv1connect.UnimplementedAgentServiceHandler
}

// Dial echoes, message by message.
func (caller) Dial(_ context.Context, s *connect.BidiStream[agentv1.DialRequest, agentv1.DialResponse]) error {
	for {
		m, err := s.Receive()
		if errors.Is(err, io.EOF) {
			return connect.NewError(connect.CodeDataLoss, errors.New("the end"))
		}
		if err != nil {
			return err
		}
		if err := s.Send(&agentv1.DialResponse{Message: &agentv1.DialResponse_Data{Data: m.GetData()}}); err != nil {
			return err
		}
	}
}

func (caller) Facts(context.Context, *connect.Request[agentv1.FactsRequest]) (*connect.Response[agentv1.FactsResponse], error) {
	return connect.NewResponse(&agentv1.FactsResponse{Processes: []*agentv1.Process{{Pid: 7}}}), nil
}

func grpcServer(t *testing.T) string {
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewAgentServiceHandler(caller{}))
	return serveH2C(t, mux, false)
}

func TestGRPC(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), grpcServer(t))
	c := agentv1connect.NewAgentServiceClient(h2c(t, f), "http://app.localhost", connect.WithGRPC())
	got, err := c.Facts(t.Context(), connect.NewRequest(&agentv1.FactsRequest{}))
	if err != nil || got.Msg.GetProcesses()[0].GetPid() != 7 {
		t.Fatalf("unary: %v, %v", got, err)
	}
	s := c.Dial(t.Context())
	for i := range 50 {
		// Each answer is read before the next message is sent.
		data := strings.Repeat("x", i*1000)
		if err := s.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_Data{Data: []byte(data)}}); err != nil {
			t.Fatal(err)
		}
		if m, err := s.Receive(); err != nil || string(m.GetData()) != data {
			t.Fatalf("message %d: %d bytes, %v", i, len(m.GetData()), err)
		}
	}
	_ = s.CloseRequest()
	if _, err := s.Receive(); connect.CodeOf(err) != connect.CodeDataLoss || !strings.Contains(err.Error(), "the end") {
		t.Fatalf("end: %v", err)
	}
	_ = s.CloseResponse()
	if n := f.dialCount(web()); n != 2 {
		t.Errorf("%d connections, want one that asked and one that is kept", n)
	}
}

func TestGRPCFailures(t *testing.T) {
	stopped := errdefs.New(errdefs.WrongState, "machine web is stopped; run holdpoint start web")
	for name, c := range map[string]struct {
		server string
		err    error
		host   string
		code   connect.Code
		want   string
	}{
		"HTTP/1 only":    {serveHTTP(t, proto), nil, "app.localhost", connect.CodeUnavailable, "port 8080 of machine web, which gRPC needs HTTP/2 on"},
		"stopped":        {"", stopped, "app.localhost", connect.CodeUnavailable, "run: holdpoint start web"},
		"nothing":        {"", errdefs.New(errdefs.NotFound, "x"), "app.localhost", connect.CodeUnavailable, "where nothing answers"},
		"not published":  {"", nil, "other.localhost", connect.CodeUnimplemented, "no machine is published as other.localhost"},
		"answers rubber": {rawServer(t, "x"), nil, "app.localhost", connect.CodeUnavailable, "it began with"},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t)
			f.publish("app.localhost", web(), c.server)
			f.fail(web(), c.err)
			client := agentv1connect.NewAgentServiceClient(h2c(t, f), "http://"+c.host, connect.WithGRPC())
			for range 2 {
				_, err := client.Facts(t.Context(), connect.NewRequest(&agentv1.FactsRequest{}))
				if connect.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
					t.Errorf("%v", err)
				}
			}
		})
	}
}

// TestUpgradeToHTTP2IsNotPassedOn: whoever got through to the machine so would
// send requests that pass no look-up.
func TestUpgradeToHTTP2IsNotPassedOn(t *testing.T) {
	f := start(t)
	seen := make(chan http.Header, 1)
	f.publish("app.localhost", web(), serveHTTP(t, func(_ http.ResponseWriter, r *http.Request) { seen <- r.Header }))
	req, _ := http.NewRequest("GET", "http://app.localhost/", nil)
	req.Header.Set("Connection", "Upgrade, HTTP2-Settings")
	req.Header.Set("Upgrade", "h2c")
	req.Header.Set("HTTP2-Settings", "AAMAAABkAAQAAP__")
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if h := <-seen; h.Get("Upgrade") != "" || h.Get("Http2-Settings") != "" || h.Get("Connection") != "" {
		t.Errorf("the machine got %v", h)
	}
}

// TestHTTP2ThatIsCut: a call under way sees an error when its machine is
// restored, and the next one goes where the route leads now.
func TestHTTP2ThatIsCut(t *testing.T) {
	f := start(t)
	f.publish("app.localhost", web(), grpcServer(t))
	c := agentv1connect.NewAgentServiceClient(h2c(t, f), "http://app.localhost", connect.WithGRPC())
	s := c.Dial(t.Context())
	if err := s.Send(&agentv1.DialRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Receive(); err != nil {
		t.Fatal(err)
	}
	restored := web()
	restored.Generation++
	f.publish("app.localhost", restored, grpcServer(t))
	f.proxy.Cut(func(t Target) bool { return t.Generation == 1 })
	if m, err := s.Receive(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the call goes on: %v, %v", m, err)
	}
	_ = s.CloseRequest()
	_ = s.CloseResponse()
	if _, err := c.Facts(t.Context(), connect.NewRequest(&agentv1.FactsRequest{})); err != nil {
		t.Error(err)
	}
	if f.dialCount(restored) == 0 {
		t.Error("the next call did not go to the restored machine")
	}
}

// TestSilentServer: a server that waits for more is spoken to in HTTP/1.
func TestSilentServer(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the patience to end")
	}
	f := start(t)
	f.publish("app.localhost", web(), serveTCP(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		if b, err := in.Peek(3); err != nil || string(b) == "PRI" {
			_, _ = io.Copy(io.Discard, in)
			return
		}
		if _, err := http.ReadRequest(in); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain")
		}
	}))
	began := time.Now()
	if resp, got := ask(t, h2c(t, f), "GET", nil); resp.StatusCode != 200 || got != "plain" {
		t.Errorf("%d %q", resp.StatusCode, got)
	}
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("took %s", took)
	}
}
