//go:build linux

package socket

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Watcher tells when something happened that may mean that a monitor answers,
// has died, or is looked for: a socket got its name or lost it, or a lock file
// was closed (which the kernel does for the dead, too). Its life: NewWatcher;
// Close, which waits for the end of its goroutine.
type Watcher struct {
	// Events has one when something happened since the last was taken.
	Events chan struct{}

	fd   int // that of file, whose Fd would make it block
	file *os.File
	done chan struct{}
}

// NewWatcher watches folders, such as that of a run and that of its sockets.
// What happened before is not told: look after making it.
func NewWatcher(dirs ...string) (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch monitor: %w", err)
	}
	w := &Watcher{fd: fd, file: os.NewFile(uintptr(fd), "inotify"), Events: make(chan struct{}, 1), done: make(chan struct{})}
	if err := w.Add(dirs...); err != nil {
		_ = w.file.Close() // nothing was watched
		return nil, err
	}
	go w.read()
	return w, nil
}

// Add watches further folders; one that is watched already is again, which
// matters after it was made anew. Not to be called at the same time as Close.
func (w *Watcher) Add(dirs ...string) error {
	const events = unix.IN_MOVED_TO | unix.IN_CLOSE_WRITE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF
	for _, dir := range dirs {
		if _, err := unix.InotifyAddWatch(w.fd, dir, events); err != nil {
			return fmt.Errorf("watch folder %q: %w", dir, err)
		}
	}
	return nil
}

func (w *Watcher) read() {
	defer close(w.done)
	var buf [4096]byte
	for {
		if _, err := w.file.Read(buf[:]); err != nil {
			return // closed
		}
		select {
		case w.Events <- struct{}{}:
		default: // one is pending
		}
	}
}

// Close ends the watch. Events is not closed.
func (w *Watcher) Close() {
	_ = w.file.Close() // ends read
	<-w.done
}
