//go:build linux

// Package reserve keeps some bytes of a home's file system back, so that on a
// full one the verbs that free space can still be journaled. It frees nothing
// else.
package reserve

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/durable"
)

// size is what is kept back, in bytes: an operation writes some tens of
// kilobytes into the catalog's log, which may have to be copied, too.
const size = 8 << 20

// spare is how much must be free besides before bytes are kept back again.
const spare = 32 << 20

// Reserve is the file that takes the bytes. Its life: Fill at the start and
// after each operation; Release when the disk is full.
type Reserve struct {
	path string

	mu sync.Mutex
}

// New returns the reserve whose file is path.
func New(path string) *Reserve { return &Reserve{path: path} }

// Fill keeps the bytes back unless they are, or the file system is nearly full.
func (r *Reserve) Fill() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if info, err := os.Stat(r.path); err == nil && info.Size() == size {
		return nil
	}
	free, err := durable.FreeBytes(filepath.Dir(r.path))
	if err != nil {
		return err
	}
	if free < size+spare {
		return nil
	}
	file, err := os.OpenFile(r.path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("keep space back: %w", err)
	}
	defer file.Close()
	if err := unix.Fallocate(int(file.Fd()), 0, 0, size); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("keep space back in %s: %w", r.path, err)
	}
	return nil
}

// Release gives the bytes back and reports whether there were any.
func (r *Reserve) Release() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return os.Remove(r.path) == nil
}
