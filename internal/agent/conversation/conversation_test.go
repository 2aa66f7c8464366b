//go:build linux

package conversation_test

import (
	"context"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/agent/conversation"
)

// TestOver: a call that its user gives up ends in a standing conversation, one
// whose connection breaks, or is reset, in one that is over.
func TestOver(t *testing.T) {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	begun, over := make(chan struct{}), make(chan bool)
	srv := &http.Server{Protocols: protocols, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		begun <- struct{}{}
		<-r.Context().Done()
		over <- conversation.Over(r.Context())
	})}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(conversation.Listen(l)) }()
	defer func() { _ = srv.Close(); <-served }()

	for name, tc := range map[string]struct {
		leave func(conn net.Conn, giveUp func())
		want  bool
	}{
		"given up": {func(_ net.Conn, giveUp func()) { giveUp() }, false},
		"closed":   {func(conn net.Conn, _ func()) { _ = conn.Close() }, true},
		"reset":    {func(conn net.Conn, _ func()) { _ = conn.(*net.TCPConn).SetLinger(0); _ = conn.Close() }, true},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			tr := &http.Transport{Protocols: protocols, DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil }}
			defer tr.CloseIdleConnections()
			ctx, giveUp := context.WithTimeout(context.Background(), 30*time.Second)
			defer giveUp()
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/", nil)
			if err != nil {
				t.Fatal(err)
			}
			failed := make(chan error, 1)
			go func() {
				resp, err := tr.RoundTrip(req)
				if err == nil {
					_ = resp.Body.Close()
				}
				failed <- err
			}()
			<-begun
			tc.leave(conn, giveUp)
			if got := <-over; got != tc.want {
				t.Errorf("over: %t, want %t", got, tc.want)
			}
			if err := <-failed; err == nil {
				t.Error("the call was answered")
			}
		})
	}
	if conversation.Over(context.Background()) {
		t.Error("what came in no conversation is over")
	}
}
