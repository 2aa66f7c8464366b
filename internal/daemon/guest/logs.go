//go:build linux

package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"connectrpc.com/connect"
	"github.com/fsnotify/fsnotify"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// logChunk is how much of a log is sent at once, in bytes.
const logChunk = 64 << 10

// Logs sends the consoles of a machine's kept runs, or what came through one of
// its routes, oldest first.
func (s *Service) Logs(ctx context.Context, req *connect.Request[holdpointv1.GuestLogsRequest], stream *connect.ServerStream[holdpointv1.GuestLogsResponse]) error {
	m, err := s.cfg.Catalog.ResolveMachine(ctx, req.Msg.GetMachine())
	if err != nil {
		return wire.Encode(err)
	}
	c := &tail{read: map[string]int64{}, send: func(data []byte) error {
		return stream.Send(&holdpointv1.GuestLogsResponse{Data: data})
	}}
	if host := req.Msg.GetRoute(); host != "" {
		c.source, err = s.visits(ctx, m, host)
		if err != nil {
			return wire.Encode(err)
		}
	} else {
		c.source = consoles{runs: s.cfg.Home.Runs(), machine: m}
	}
	if n := req.Msg.GetTail(); n > 0 {
		if err := c.skipTo(int(n)); err != nil {
			return wire.Encode(err)
		}
	}
	if err := c.copy(); err != nil {
		return wire.Encode(err)
	}
	if !c.sent {
		if err := stream.Send(&holdpointv1.GuestLogsResponse{Silent: c.source.silent()}); err != nil {
			return err
		}
	}
	if !req.Msg.GetFollow() {
		return nil
	}
	return wire.Encode(c.follow(ctx))
}

// source is what is read: files that grow, in folders that can be watched.
type source interface {
	// files are there now, oldest first.
	files() ([]string, error)
	// folders are where they are, or will be.
	folders() ([]string, error)
	// silent says why there is nothing.
	silent() string
}

// tail reads a source and what comes to it.
type tail struct {
	source source
	// read is how far each file was read.
	read map[string]int64
	send func([]byte) error
	// sent says that something was.
	sent bool
}

// copy sends what was not read yet.
func (c *tail) copy() error {
	paths, err := c.source.files()
	if err != nil {
		return err
	}
	for _, path := range paths {
		if err := c.copyFile(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (c *tail) copyFile(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("read log: %w", err)
	}
	defer file.Close()
	buffer := make([]byte, logChunk)
	for {
		n, err := file.ReadAt(buffer, c.read[path])
		if n > 0 {
			if err := c.send(buffer[:n]); err != nil {
				return err
			}
			c.read[path] += int64(n)
			c.sent = true
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return errdefs.New(errdefs.Storage, "read log: %w", err)
		}
	}
}

// skipTo marks as read all but the last lines.
func (c *tail) skipTo(lines int) error {
	paths, err := c.source.files()
	if err != nil {
		return err
	}
	for i := len(paths) - 1; i >= 0; i-- {
		data, err := os.ReadFile(paths[i])
		if err != nil {
			continue
		}
		at := len(data)
		for end := len(bytes.TrimSuffix(data, []byte("\n"))); lines > 0 && end > 0; lines-- {
			end = bytes.LastIndexByte(data[:end], '\n')
			at = end + 1
		}
		c.read[paths[i]] = int64(at)
	}
	return nil
}

// follow sends what is there and what comes, until ctx ends.
func (c *tail) follow(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch logs: %w", err)
	}
	defer watcher.Close()
	for {
		folders, err := c.source.folders()
		if err != nil {
			return err
		}
		for _, folder := range folders {
			// A watch that is there already is kept; a folder that went is no loss.
			_ = watcher.Add(folder)
		}
		if err := c.copy(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-watcher.Events:
		case err := <-watcher.Errors:
			return fmt.Errorf("watch logs: %w", err)
		}
	}
}
