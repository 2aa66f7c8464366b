//go:build linux

package monitor

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// watcher tells when something happened that may mean that a monitor answers
// or has died: a socket got its name, or a lock file was closed (which the
// kernel does for the dead, too).
type watcher struct {
	file   *os.File
	events chan struct{}
	done   chan struct{}
}

// newWatcher watches the run's folder and its socket folder. What happened
// before is not told: look after making it.
func newWatcher(dirs ...string) (*watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch monitor: %w", err)
	}
	w := &watcher{file: os.NewFile(uintptr(fd), "inotify"), events: make(chan struct{}, 1), done: make(chan struct{})}
	for _, dir := range dirs {
		if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_MOVED_TO|unix.IN_CLOSE_WRITE); err != nil {
			_ = w.file.Close() // nothing was watched
			return nil, fmt.Errorf("watch folder %q: %w", dir, err)
		}
	}
	go w.read()
	return w, nil
}

func (w *watcher) read() {
	defer close(w.done)
	var buf [4096]byte
	for {
		if _, err := w.file.Read(buf[:]); err != nil {
			return // closed
		}
		select {
		case w.events <- struct{}{}:
		default: // one is pending
		}
	}
}

func (w *watcher) close() {
	_ = w.file.Close() // ends read
	<-w.done
}
