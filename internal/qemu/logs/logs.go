//go:build linux

// Package logs keeps files small that a process which may not be trusted
// writes to, and waits for what is written. It reads no meaning into them.
package logs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Watcher watches files for changes until it is closed.
type Watcher struct{ file *os.File }

// Watch begins to watch files that exist.
func Watch(paths ...string) (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("watch files: %w", err)
	}
	n := &Watcher{file: os.NewFile(uintptr(fd), "inotify")}
	for _, path := range paths {
		if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY); err != nil {
			return nil, errors.Join(fmt.Errorf("watch %q: %w", path, err), n.file.Close())
		}
	}
	return n, nil
}

// Wait returns when something has changed since the last call, or ctx ends.
func (n *Watcher) Wait(ctx context.Context) error {
	buf := make([]byte, 4096)
	stop := context.AfterFunc(ctx, func() { _ = n.file.Close() })
	defer stop()
	_, err := n.file.Read(buf)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// Close ends it.
func (n *Watcher) Close() { _ = n.file.Close() }

// Tail reads the last n bytes of a file; nothing when it cannot.
func Tail(path string, n int64) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil
	}
	b, _ := io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-n), n)) // what was read counts
	return b
}

// The guest decides how much its console prints, and can make QEMU print and
// report events too; none of it may fill the host's disk. Sizes in bytes.
const (
	// Limit is how long a log may grow, Kept what is then left of it.
	Limit = 8 << 20
	Kept  = 2 << 20
	// logPause is the least time between two looks, however much is printed.
	logPause = time.Second
)

// Config says what Keep looks after.
type Config struct {
	// Appended are logs whose writers append.
	Appended []string
	// Other is one whose writer does not.
	Other string
	Log   *slog.Logger
}

// Keep shortens logs, which exist, whenever they have grown longer than
// Limit, until ctx ends.
func Keep(ctx context.Context, cfg Config) {
	n, err := Watch(append([]string{cfg.Other}, cfg.Appended...)...)
	if err != nil {
		cfg.Log.WarnContext(ctx, "logs not watched", "error", err)
		return
	}
	defer n.Close()
	for {
		for _, path := range cfg.Appended {
			if err := shorten(path, Limit, Kept); err != nil {
				cfg.Log.WarnContext(ctx, "log not shortened", "file", path, "error", err)
			}
		}
		if err := punch(cfg.Other, Limit, Kept); err != nil {
			cfg.Log.WarnContext(ctx, "log not shortened", "file", cfg.Other, "error", err)
		}
		if n.Wait(ctx) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(logPause):
		}
	}
}

// shorten leaves about the last keep bytes of a log that is longer than limit.
// Its writer appends, so it goes on behind what was kept; what it writes
// meanwhile may come before it.
func shorten(path string, limit, keep int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || st.Size() <= limit {
		return err
	}
	kept := Tail(path, keep)
	if i := bytes.IndexByte(kept, '\n'); i >= 0 {
		kept = kept[i+1:]
	}
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err = f.Write(kept)
	return err
}

// punch frees all but the last keep bytes of a file whose writer does not append.
func punch(path string, limit, keep int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if ok && sys.Blocks*512 <= limit || st.Size() <= limit {
		return nil
	}
	err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, st.Size()-keep)
	if err == unix.EOPNOTSUPP {
		return nil
	}
	return err
}
