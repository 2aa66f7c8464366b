//go:build linux

package process

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/api/monitor/v1/monitorv1connect"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
	"github.com/holdpoint/holdpoint/internal/monitor/socket"
)

// server answers on the monitor's socket. Its life: listen; close.
type server struct {
	m      *supervisor
	http   *http.Server
	socket *socket.Socket
	// calls counts the calls under way.
	calls sync.WaitGroup
}

// listen begins to answer on the unix socket at path. After the run's end
// nobody needs its name, and the folders are not ours.
func (m *supervisor) listen(path string) (s *server, err error) {
	s = &server{m: m}
	s.http = s.handler()
	s.socket, err = socket.Listen(socket.Config{
		Path: path, Dir: m.Dir, Files: m.Files, Log: m.Log,
		Serve:  func(ln net.Listener) { _ = s.http.Serve(ln) }, // until closed, by us or by http
		Wanted: func() bool { return m.status().GetExit() == nil },
	})
	return s, err
}

func (s *server) handler() *http.Server {
	mux := http.NewServeMux()
	mux.Handle(monitorv1connect.NewMonitorServiceHandler(service{m: s.m}))
	mux.Handle("/"+agentv1connect.AgentServiceName+"/", relay.NewProxy(relay.Proxy{Find: s.m.conversation, Gone: s.m.gone}))
	counted := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.calls.Add(1)
		defer s.calls.Done()
		mux.ServeHTTP(w, r)
	})
	var protocols http.Protocols
	protocols.SetHTTP1(true) // for curl
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:   counted,
		Protocols: &protocols,
		HTTP2:     relay.ServerHTTP2(),
		ErrorLog:  slog.NewLogLogger(s.m.Log.Handler(), slog.LevelWarn),
	}
}

// lastWords is how long callers get to read the last status. It matters only
// for one that does not read: others are let go as soon as they have it.
const lastWords = 250 * time.Millisecond

// close ends the server. After the run's end all who watch, or wait for that
// end, get their answer first; who does not go then is cut off.
func (s *server) close() {
	if s.m.status().GetExit() != nil {
		s.part()
	}
	s.socket.Close()
	_ = s.http.Close() // of connections nobody needs anymore
}

// part answers all who are owed an answer. Ends that are cut off nevertheless
// are found in the record by the client.
func (s *server) part() {
	ctx, cancel := context.WithTimeout(context.Background(), lastWords)
	defer cancel()
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		s.calls.Wait() // ends at the latest with the connections
	}()
	select {
	case <-answered:
		_ = s.http.Shutdown(ctx) // what is left then is closed by force
	case <-ctx.Done():
	}
}
