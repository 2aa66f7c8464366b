//go:build linux

package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/holdpoint/holdpoint/api/agent/v1/agentv1connect"
	"github.com/holdpoint/holdpoint/api/monitor/v1/monitorv1connect"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/relay"
)

// server answers on the monitor's socket. Its life: listen; close.
type server struct {
	m    *supervisor
	http *http.Server
	path string
	// ln is bound as the file that bound describes; both belong to keepName
	// once it runs.
	ln    net.Listener
	bound os.FileInfo
	// stop, closed, ends keepName; served waits for all that the server runs.
	stop   chan struct{}
	served sync.WaitGroup

	// calls counts the calls under way.
	calls sync.WaitGroup
}

// listen begins to answer on the unix socket at path. A socket file of a dead
// predecessor is replaced, and whoever sees the name can connect. When the name
// is lost, it is given again.
func (m *supervisor) listen(path string) (*server, error) {
	s := &server{m: m, path: path, stop: make(chan struct{})}
	s.http = s.handler()
	watch, err := monitor.NewWatcher(m.Dir, filepath.Dir(path))
	if err == nil {
		err = s.bind()
	}
	if err != nil {
		if watch != nil {
			watch.Close()
		}
		return nil, err
	}
	s.served.Go(func() {
		defer watch.Close()
		s.keepName(watch)
	})
	return s, nil
}

// bind makes a socket, serves on it, and gives it its name.
func (s *server) bind() error {
	tmp := s.path + ".new"
	if err := os.Remove(tmp); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("listen on %q: %w", s.path, err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: tmp})
	if err != nil {
		return fmt.Errorf("listen on %q: %w", s.path, err)
	}
	ln.SetUnlinkOnClose(false)
	bound, err := os.Lstat(tmp)
	if err == nil {
		err = os.Rename(tmp, s.path)
	}
	if err != nil {
		_ = ln.Close() // the rename's error says more
		return fmt.Errorf("listen on %q: %w", s.path, err)
	}
	if s.ln != nil {
		_ = s.ln.Close() // nobody finds it any more; its connections stay
	}
	s.ln, s.bound = ln, bound
	s.served.Go(func() { _ = s.http.Serve(ln) }) // until closed, by us or by http
	return nil
}

// keepName binds the socket again when its name is lost, by the hint of any
// change in its folder or in the run's, where a starter writes who looks for us.
// After the run's end nobody needs it, and the folders are not ours.
func (s *server) keepName(watch *monitor.Watcher) {
	for {
		select {
		case <-s.stop:
			return
		case <-watch.Events:
		}
		now, err := os.Lstat(s.path)
		if err == nil && os.SameFile(now, s.bound) || s.m.status().GetExit() != nil {
			continue
		}
		dir := filepath.Dir(s.path)
		if _, err = os.Stat(s.m.Dir); err == nil {
			err = s.m.Files.MkdirAll(dir)
		}
		if err == nil {
			err = errors.Join(watch.Add(dir), s.bind())
		}
		if err != nil {
			s.m.Log.Warn("the monitor's socket lost its name", "path", s.path, "error", err)
			continue
		}
		s.m.Log.Info("the monitor's socket has its name again", "path", s.path)
	}
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
	close(s.stop)
	_ = s.http.Close() // of a listener and connections nobody needs anymore
	s.served.Wait()
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
