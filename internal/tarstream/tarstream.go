// Package tarstream carries files and folders between the host and a guest as
// a tar stream: modes, links, times to the nanosecond, holes, owners and
// special files where they are wanted. The stream is POSIX.1-2001 (pax), its
// names relative; an archive is hostile until it is unpacked, and unpacking
// one never touches anything outside the folder it was told, nor writes
// through a symbolic link. It is no general archiver: extended attributes are
// not carried.
//
// A file with holes has the pax records
//
//	HOLDPOINT.size    its length in bytes, decimal
//	HOLDPOINT.sparse  offset,length of each piece of data, decimal, comma-separated
//
// and its content in the archive is only the pieces, one after the other.
package tarstream

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// chunk is the size of the pieces that are read, written and handed on. The
// agent link moves most bytes a second in writes of this size.
const chunk = 256 << 10

// Options says what unpacking may do. The zero value is for an ordinary user
// and an archive without limits.
type Options struct {
	// Owners gives each file the owner and group that the archive names, and
	// keeps its set-user-ID and set-group-ID bits. It needs root. Without it
	// files belong to whoever unpacks them, and the bits are dropped.
	Owners bool
	// Special makes device nodes and pipes; without it, and where the system
	// refuses, they are skipped.
	Special bool
	// Direct writes large files past the page cache, which is faster where the
	// CPU is emulated. What was written is not in the cache then.
	Direct bool
	// MaxBytes limits the bytes of data, MaxFiles the number of entries;
	// 0 is no limit. More gets an error of kind INVALID.
	MaxBytes int64
	MaxFiles int64
}

// Result is what was unpacked.
type Result struct {
	// Files counts all entries but the skipped ones, Bytes the data in them
	// (holes excluded).
	Files, Bytes uint64
	// Skipped counts the special files that could not be made.
	Skipped uint64
}

// localName checks a name from an archive and returns it clean.
func localName(name string) (string, error) {
	clean := path.Clean(name)
	if name == "" || strings.ContainsRune(name, 0) || !filepath.IsLocal(filepath.FromSlash(clean)) {
		return "", errdefs.New(errdefs.Invalid, "archive entry %q: the name leads out of the folder", name)
	}
	return clean, nil
}

// kinded gives err of the system its kind and says what was done to which path.
func kinded(verb, name string, err error) error {
	if err == nil {
		return nil
	}
	wrapped := fmt.Errorf("%s %q: %w", verb, name, err)
	var pe *fs.PathError
	if errors.As(err, &pe) {
		wrapped = fmt.Errorf("%s %q: %w", verb, name, pe.Err)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.As(errdefs.NotFound, wrapped)
	case errors.Is(err, fs.ErrPermission):
		return errdefs.As(errdefs.Denied, wrapped)
	case errors.Is(err, syscall.ENOSPC):
		return errdefs.As(errdefs.NoSpace, wrapped)
	}
	return wrapped
}
