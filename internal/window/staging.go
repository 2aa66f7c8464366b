//go:build linux

package window

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/dirty"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// The files of a staging folder.
const (
	memoryFile  = "memory"
	pagesFile   = "pages"
	devicesFile = "devices"
)

const (
	// pieceSize is how much is copied at once, in bytes.
	pieceSize = 1 << 20
	// maxReserve bounds the memory of our own for the window's last pages, in
	// bytes; what is more goes to the file at once.
	maxReserve = 8 << 20
	// moreWritten is what the reserve has beyond the pages known before, for
	// those written since, in bytes.
	moreWritten = 4 << 20
)

// staging is the folder being filled. Its buffers are no memory of Go's, which
// a small process would keep for long. Its life: stage; copyLive any number of
// times; reserve and copyStill once; complete, or discard at any point.
type staging struct {
	dir             string
	from            io.ReaderAt
	memory, devices *os.File
	piece           []byte
	// kept has the last pages, one after the other, those of last in order,
	// up to fill.
	kept []byte
	last *dirty.Set
	fill int64
	// copied counts bytes, in the time spent.
	copied int64
	spent  time.Duration
}

// CleanStaging removes what a window that was never completed may have left in
// the folder. A folder that is not there is clean.
func CleanStaging(dir string) error {
	for _, name := range []string{memoryFile, pagesFile, devicesFile} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errdefs.New(errdefs.Storage, "clean staging folder: %w", err)
		}
	}
	return nil
}

func stage(dir string, memoryBytes int64, from io.ReaderAt) (_ *staging, err error) {
	if err := CleanStaging(dir); err != nil {
		return nil, err
	}
	s := &staging{dir: dir, from: from}
	defer func() {
		if err != nil {
			s.discard()
		}
	}()
	if s.memory, err = create(dir, memoryFile); err != nil {
		return nil, err
	}
	if err := s.memory.Truncate(memoryBytes); err != nil {
		return nil, storage("make", s.memory.Name(), err)
	}
	if s.devices, err = create(dir, devicesFile); err != nil {
		return nil, err
	}
	s.piece, err = mapMemory(pieceSize, 0)
	return s, err
}

// create makes a file for writing only, as the hypervisor wants it.
func create(dir, name string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, storage("make", filepath.Join(dir, name), err)
	}
	return f, nil
}

func mapMemory(size, flags int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|flags)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes to copy memory through: %w", size, err)
	}
	return b, nil
}

// copyLive copies the pages as they are to the file.
func (s *staging) copyLive(ctx context.Context, set *dirty.Set) error {
	began := time.Now()
	defer func() { s.spent += time.Since(began) }()
	for offset, length := range set.Runs() {
		if err := s.through(ctx, offset, length); err != nil {
			return err
		}
	}
	return nil
}

// through copies a run of pages to the file.
func (s *staging) through(ctx context.Context, offset, length int64) error {
	for length > 0 {
		if err := ended(ctx); err != nil {
			return err
		}
		n := min(length, int64(len(s.piece)))
		if err := s.read(s.piece[:n], offset); err != nil {
			return err
		}
		if err := s.write(s.piece[:n], offset); err != nil {
			return err
		}
		s.copied += n
		offset, length = offset+n, length-n
	}
	return nil
}

// reserve prepares for so many bytes of last pages.
func (s *staging) reserve(bytes int64) (err error) {
	s.kept, err = mapMemory(int(min(bytes+moreWritten, maxReserve)), unix.MAP_POPULATE)
	return err
}

// copyStill copies the last pages: as many as there is room for to memory, the
// rest to the file.
func (s *staging) copyStill(ctx context.Context, set *dirty.Set) error {
	s.last = set
	for offset, length := range set.Runs() {
		if err := ended(ctx); err != nil {
			return err
		}
		n := min(length, int64(len(s.kept))-s.fill)
		if err := s.read(s.kept[s.fill:s.fill+n], offset); err != nil {
			return err
		}
		s.fill, s.copied = s.fill+n, s.copied+n
		if err := s.through(ctx, offset+n, length-n); err != nil {
			return err
		}
	}
	return nil
}

// complete writes what was kept, and the set, and closes the files.
func (s *staging) complete(pages *dirty.Set) error {
	rest := s.kept[:s.fill]
	for offset, length := range s.last.Runs() {
		n := min(length, int64(len(rest)))
		if n == 0 {
			break
		}
		if err := s.write(rest[:n], offset); err != nil {
			return err
		}
		rest = rest[n:]
	}
	b, err := pages.MarshalBinary()
	if err != nil {
		return err
	}
	set, err := create(s.dir, pagesFile)
	if err != nil {
		return err
	}
	if _, err = set.Write(b); err != nil {
		err = storage("write", set.Name(), err)
	}
	return errors.Join(err, set.Close(), s.close())
}

func (s *staging) read(b []byte, offset int64) error {
	if n, err := s.from.ReadAt(b, offset); n < len(b) {
		return fmt.Errorf("copy memory at offset %d: %w", offset+int64(n), err)
	}
	return nil
}

func (s *staging) write(b []byte, offset int64) error {
	if _, err := s.memory.WriteAt(b, offset); err != nil {
		return storage("write", s.memory.Name(), err)
	}
	return nil
}

// close lets go of the files and buffers. It may be called again.
func (s *staging) close() (err error) {
	for _, f := range []*os.File{s.memory, s.devices} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	for _, b := range [][]byte{s.piece, s.kept} {
		if b != nil {
			_ = unix.Munmap(b) // it is ours
		}
	}
	s.memory, s.devices, s.piece, s.kept = nil, nil, nil, nil
	return err
}

// discard removes all that was made.
func (s *staging) discard() {
	_ = s.close()           // of files that go
	_ = CleanStaging(s.dir) // the next window, or whoever owns the folder, tries again
}

func storage(verb, path string, err error) error {
	kind := errdefs.Storage
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		kind = errdefs.NoSpace
	}
	return errdefs.New(kind, "%s %q: %w", verb, path, err)
}
