//go:build linux

// Package socket is a private unix socket that stays bound: when its path goes
// away under a running daemon (a cleaner of temporary files, a logout), it is
// bound again. It does not say who may listen; the home's lock does.
package socket

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/fsnotify/fsnotify"

	"github.com/holdpoint/holdpoint/internal/durable"
)

// Config is what a Listener needs.
type Config struct {
	// Path is the socket's; its folder is private and made again if need be.
	Path  string
	Files *durable.FS
	Log   *slog.Logger
}

// Listener is a net.Listener. Close ends it and removes the socket.
type Listener struct {
	cfg     Config
	watcher *fsnotify.Watcher
	conns   chan net.Conn
	closed  chan struct{}
	once    sync.Once
	wg      sync.WaitGroup

	mu    sync.Mutex
	bound net.Listener
}

// Listen binds the socket, in the place of a dead one.
func Listen(cfg Config) (*Listener, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch socket %s: %w", cfg.Path, err)
	}
	l := &Listener{cfg: cfg, watcher: watcher, conns: make(chan net.Conn), closed: make(chan struct{})}
	if err := l.bind(); err != nil {
		return nil, errors.Join(err, watcher.Close())
	}
	l.wg.Go(l.watch)
	return l, nil
}

// bind makes the socket, watches its folder, and accepts from it.
func (l *Listener) bind() error {
	path := l.cfg.Path
	if err := l.cfg.Files.MkdirAll(filepath.Dir(path)); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove old socket %s: %w", path, err)
	}
	bound, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return errors.Join(fmt.Errorf("close socket %s to others: %w", path, err), bound.Close())
	}
	if err := l.watcher.Add(filepath.Dir(path)); err != nil {
		return errors.Join(fmt.Errorf("watch socket %s: %w", path, err), bound.Close())
	}
	l.mu.Lock()
	l.bound = bound
	l.mu.Unlock()
	l.wg.Go(func() { l.accept(bound) })
	return nil
}

func (l *Listener) accept(bound net.Listener) {
	for {
		conn, err := bound.Accept()
		if err != nil {
			return // it was closed
		}
		select {
		case l.conns <- conn:
		case <-l.closed:
			_ = conn.Close() // nobody serves it
		}
	}
}

// watch binds the socket again when its path is gone.
func (l *Listener) watch() {
	for {
		select {
		case <-l.closed:
			return
		case _, ok := <-l.watcher.Events:
			if !ok {
				return
			}
		case err, ok := <-l.watcher.Errors:
			if !ok {
				return
			}
			l.cfg.Log.Warn("watch socket", "path", l.cfg.Path, "error", err)
		}
		if _, err := os.Lstat(l.cfg.Path); !errors.Is(err, os.ErrNotExist) {
			continue
		}
		select {
		case <-l.closed:
			return
		default:
		}
		l.cfg.Log.Warn("the socket went away, binding it again", "path", l.cfg.Path)
		l.unbind()
		if err := l.bind(); err != nil {
			l.cfg.Log.Error("bind socket again", "path", l.cfg.Path, "error", err)
		}
	}
}

func (l *Listener) unbind() {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.bound.Close() // its path is gone already, or goes now
}

// Accept waits for the next connection.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close ends the listener.
func (l *Listener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.unbind()
		_ = l.watcher.Close() // nothing was written
		l.wg.Wait()
	})
	return nil
}

// Addr is the socket's address.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: l.cfg.Path, Net: "unix"} }
