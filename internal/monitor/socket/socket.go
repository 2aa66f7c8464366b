//go:build linux

package socket

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/holdpoint/holdpoint/internal/durable"
)

// Config is what a socket is made of.
type Config struct {
	// Path is its name.
	Path string
	// Dir is the run's folder, where a starter writes who looks for us.
	Dir string
	// Serve accepts connections until the listener is closed.
	Serve func(net.Listener)
	// Wanted reports whether the name is given again when it is lost.
	Wanted func() bool
	// Files is the door to the disk; nil is the usual one.
	Files *durable.FS
	Log   *slog.Logger
}

// Socket is a listening one with a name. Its life: Listen; Close.
type Socket struct {
	Config
	// ln is bound as the file that bound describes; both belong to keepName
	// once it runs.
	ln    net.Listener
	bound os.FileInfo
	// stop, closed, ends keepName; kept is closed when it has ended.
	stop, kept chan struct{}
	served     sync.WaitGroup
}

// Listen begins to listen. A socket file of a dead predecessor is replaced, and
// whoever sees the name can connect. When the name is lost, it is given again.
func Listen(cfg Config) (*Socket, error) {
	s := &Socket{Config: cfg, stop: make(chan struct{}), kept: make(chan struct{})}
	watch, err := NewWatcher(cfg.Dir, filepath.Dir(cfg.Path))
	if err == nil {
		err = s.bind()
	}
	if err != nil {
		if watch != nil {
			watch.Close()
		}
		return nil, err
	}
	go func() {
		defer close(s.kept)
		defer watch.Close()
		s.keepName(watch)
	}()
	return s, nil
}

// bind makes a socket, serves on it, and gives it its name.
func (s *Socket) bind() error {
	tmp := s.Path + ".new"
	if err := os.Remove(tmp); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("listen on %q: %w", s.Path, err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: tmp})
	if err != nil {
		return fmt.Errorf("listen on %q: %w", s.Path, err)
	}
	ln.SetUnlinkOnClose(false)
	bound, err := os.Lstat(tmp)
	if err == nil {
		err = os.Rename(tmp, s.Path)
	}
	if err != nil {
		_ = ln.Close() // the rename's error says more
		return fmt.Errorf("listen on %q: %w", s.Path, err)
	}
	if s.ln != nil {
		_ = s.ln.Close() // nobody finds it any more; its connections stay
	}
	s.ln, s.bound = ln, bound
	s.served.Go(func() { s.Serve(ln) })
	return nil
}

// keepName binds the socket again when its name is lost, by the hint of any
// change in its folder or in the run's.
func (s *Socket) keepName(watch *Watcher) {
	for {
		select {
		case <-s.stop:
			return
		case <-watch.Events:
		}
		now, err := os.Lstat(s.Path)
		if err == nil && os.SameFile(now, s.bound) || !s.Wanted() {
			continue
		}
		dir := filepath.Dir(s.Path)
		if _, err = os.Stat(s.Dir); err == nil {
			err = s.Files.MkdirAll(dir)
		}
		if err == nil {
			err = errors.Join(watch.Add(dir), s.bind())
		}
		if err != nil {
			s.Log.Warn("the monitor's socket lost its name", "path", s.Path, "error", err)
			continue
		}
		s.Log.Info("the monitor's socket has its name again", "path", s.Path)
	}
}

// Close ends the listening and takes the name away; connections stay.
func (s *Socket) Close() {
	close(s.stop)
	<-s.kept
	_ = s.ln.Close() // of a listener nobody needs anymore
	s.served.Wait()
	_ = os.Remove(s.Path) // a stale one would be replaced
}
