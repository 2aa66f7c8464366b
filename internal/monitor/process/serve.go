//go:build linux

package process

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/api/monitor/v1/monitorv1connect"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
)

// server answers on the monitor's socket. Its life: listen; close.
type server struct {
	m      *supervisor
	http   *http.Server
	path   string
	served chan struct{}

	// calls counts the MonitorService calls under way.
	calls sync.WaitGroup
}

// listen begins to answer on the unix socket at path. A socket file of a dead
// predecessor is replaced, and whoever sees the name can connect.
func (m *supervisor) listen(path string) (*server, error) {
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("listen on %q: %w", path, err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: tmp})
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w", path, err)
	}
	ln.SetUnlinkOnClose(false)
	if err := os.Rename(tmp, path); err != nil {
		_ = ln.Close() // the rename's error says more
		return nil, fmt.Errorf("listen on %q: %w", path, err)
	}
	s := &server{m: m, path: path, served: make(chan struct{})}
	s.http = s.handler()
	go func() {
		defer close(s.served)
		_ = s.http.Serve(ln) // ErrServerClosed, by close
	}()
	return s, nil
}

func (s *server) handler() *http.Server {
	mux := http.NewServeMux()
	path, service := monitorv1connect.NewMonitorServiceHandler(service{s.m})
	mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
		s.calls.Add(1)
		defer s.calls.Done()
		service.ServeHTTP(w, r)
	})
	mux.Handle("/"+agentv1connect.AgentServiceName+"/", relay.NewProxy(s.m.conversation))
	var protocols http.Protocols
	protocols.SetHTTP1(true) // for curl
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:   mux,
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
	_ = s.http.Close() // of a listener and connections nobody needs anymore
	<-s.served
	_ = os.Remove(s.path) // a stale one would be replaced
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
