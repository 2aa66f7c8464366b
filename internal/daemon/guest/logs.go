//go:build linux

package guest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"connectrpc.com/connect"
	"github.com/fsnotify/fsnotify"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/monitor"
	"github.com/holdpoint/holdpoint/internal/monitor/runs"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// logChunk is how much of a console is sent at once, in bytes.
const logChunk = 64 << 10

// Logs sends the consoles of a machine's kept runs, oldest first.
func (s *Service) Logs(ctx context.Context, req *connect.Request[holdpointv1.GuestLogsRequest], stream *connect.ServerStream[holdpointv1.GuestLogsResponse]) error {
	m, err := s.cfg.Catalog.ResolveMachine(ctx, req.Msg.GetMachine())
	if err != nil {
		return wire.Encode(err)
	}
	c := &consoles{runs: s.cfg.Home.Runs(), machine: m.ID, read: map[string]int64{}, send: func(data []byte) error {
		return stream.Send(&holdpointv1.GuestLogsResponse{Data: data})
	}}
	if n := req.Msg.GetTail(); n > 0 {
		if err := c.skipTo(int(n)); err != nil {
			return wire.Encode(err)
		}
	}
	if err := c.copy(); err != nil {
		return wire.Encode(err)
	}
	if !c.sent {
		if err := stream.Send(&holdpointv1.GuestLogsResponse{Silent: c.silent(m.Name)}); err != nil {
			return err
		}
	}
	if !req.Msg.GetFollow() {
		return nil
	}
	return wire.Encode(c.follow(ctx))
}

// consoles reads the console logs of a machine's runs.
type consoles struct {
	// runs is the folder of all runs.
	runs    string
	machine string
	// read is how far each log was read.
	read map[string]int64
	send func([]byte) error
	// sent says that something was.
	sent bool
}

// silent says why there is nothing on the consoles.
func (c *consoles) silent(name string) string {
	dirs, err := runs.Of(c.runs, c.machine)
	if err != nil || len(dirs) == 0 {
		return "no console of machine " + name + " is kept"
	}
	cfg, err := monitor.ReadConfig(dirs[0])
	switch {
	case err != nil || cfg.Run.Incoming == nil:
		return "the console of machine " + name + " has said nothing yet"
	case cfg.Run.Incoming.Unconfigured:
		return "machine " + name + " continued from its image's kept boot, and its console has said nothing since"
	}
	return "machine " + name + " continued from a checkpoint, and its console has said nothing since"
}

// files are the console logs, oldest first.
func (c *consoles) files() ([]string, error) {
	dirs, err := runs.Of(c.runs, c.machine)
	if err != nil {
		return nil, err
	}
	var paths []string
	modified := map[string]int64{}
	for _, dir := range dirs {
		path := filepath.Join(dir, "console.log")
		if info, err := os.Stat(path); err == nil {
			paths = append(paths, path)
			modified[path] = info.ModTime().UnixNano()
		}
	}
	slices.SortFunc(paths, func(a, b string) int { return cmp.Compare(modified[a], modified[b]) })
	return paths, nil
}

// copy sends what was not read yet.
func (c *consoles) copy() error {
	paths, err := c.files()
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

func (c *consoles) copyFile(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("read console: %w", err)
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
			return errdefs.New(errdefs.Storage, "read console: %w", err)
		}
	}
}

// skipTo marks as read all but the last lines.
func (c *consoles) skipTo(lines int) error {
	paths, err := c.files()
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
func (c *consoles) follow(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch consoles: %w", err)
	}
	defer watcher.Close()
	for {
		// A watch that is there already is kept; a folder that went is no loss.
		_ = watcher.Add(c.runs)
		// All of them: whose a new one is, its config says in a moment.
		runs, err := filepath.Glob(filepath.Join(c.runs, "*"))
		if err != nil {
			return fmt.Errorf("list runs: %w", err)
		}
		for _, run := range runs {
			_ = watcher.Add(run)
		}
		if err := c.copy(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-watcher.Events:
		case err := <-watcher.Errors:
			return fmt.Errorf("watch consoles: %w", err)
		}
	}
}
