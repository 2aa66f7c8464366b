package sparse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Way is how a file was copied.
type Way string

// The ways. Cloned files share their blocks until one of them is written to.
const (
	Cloned Way = "reflink"
	Read   Way = "data"
)

// copyBuffer is how much is read and written at once, in bytes.
const copyBuffer = 1 << 20

// probeBytes is a multiple of the block size of every file system that clones.
const probeBytes = 64 << 10

// CopyFile makes to, which is empty, the same as from, in size and content: as a
// clone of it where the file system can, else by its data alone, which leaves
// holes where from has them. Neither is synced. progress is called with how
// many bytes of data are copied, of how many. Nobody may write to from meanwhile;
// a copy of a file that was written to is CONFLICT. Other errors name neither file.
func CopyFile(ctx context.Context, to, from *os.File, progress func(done, total int64)) (Way, error) {
	before, err := stat(from)
	if err != nil {
		return "", err
	}
	way, total := Cloned, before.Blocks*512
	err = unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
	if cannotClone(err) {
		way, err = Read, copyData(ctx, to, from, before.Size, func(done int64) { progress(min(done, total), total) })
	}
	if err != nil {
		return "", classify(err)
	}
	after, err := stat(from)
	switch {
	case err != nil:
		return "", err
	case before.Size != after.Size || before.Mtim != after.Mtim:
		return "", errdefs.New(errdefs.Conflict, "it was written to while it was copied; try again")
	}
	progress(total, total)
	return way, nil
}

// cannotClone reports whether a clone was refused because of what the files lie
// on, so that a copy of the data may work.
func cannotClone(err error) bool {
	for _, no := range []error{unix.EOPNOTSUPP, unix.ENOTTY, unix.ENOSYS, unix.EXDEV, unix.EINVAL, unix.EPERM} {
		if errors.Is(err, no) {
			return true
		}
	}
	return false
}

// copyData writes the data of from, of size bytes, to its place in to.
func copyData(ctx context.Context, to, from *os.File, size int64, progress func(done int64)) error {
	if err := to.Truncate(size); err != nil {
		return err
	}
	buf := make([]byte, copyBuffer)
	done := int64(0)
	return eachExtent(ctx, from, 0, size, func(data, hole int64) error {
		for data < hole {
			if err := ctx.Err(); err != nil {
				return err
			}
			n, err := from.ReadAt(buf[:min(copyBuffer, hole-data)], data)
			if n == 0 && err != nil {
				return err
			}
			if _, err := to.WriteAt(buf[:n], data); err != nil {
				return err
			}
			data, done = data+int64(n), done+int64(n)
			progress(done)
		}
		return nil
	})
}

// CopyBytes is what a copy of from in the folder would take there, in bytes, or a
// little more: nothing where it would be a clone.
func CopyBytes(from *os.File, dir string) (int64, error) {
	info, err := stat(from)
	if err != nil {
		return 0, err
	}
	probe, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return info.Blocks * 512, nil // no file system that clones is without such files
	}
	defer unix.Close(probe)
	if unix.IoctlFileCloneRange(probe, &unix.FileCloneRange{Src_fd: int64(from.Fd()), Src_length: probeBytes}) == nil {
		return 0, nil
	}
	return info.Blocks * 512, nil
}

// DigestFile is Digest of the file at path, as the catalog has it, and what the
// file takes on the host, in bytes. Its errors leave it to the caller to name
// the file.
func DigestFile(ctx context.Context, path string) (digest string, bytes int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, errdefs.New(errdefs.Storage, "read it: %w", err)
	}
	defer f.Close()
	info, err := stat(f)
	if err != nil {
		return "", 0, err
	}
	if digest, err = Digest(ctx, f); err != nil {
		if ctx.Err() != nil {
			return "", 0, context.Cause(ctx)
		}
		return "", 0, errdefs.New(errdefs.Storage, "read it: %w", err)
	}
	return "disk-sha256:" + digest, info.Blocks * 512, nil
}

func stat(f *os.File) (unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return st, errdefs.New(errdefs.Storage, "look at it: %w", err)
	}
	return st, nil
}

// classify gives an error of a copy its kind. One of a canceled copy stays.
func classify(err error) error {
	switch {
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT):
		return errdefs.New(errdefs.NoSpace, "%w; free some space", err)
	case errors.Is(err, io.EOF):
		return errdefs.New(errdefs.Conflict, "it became shorter while it was copied; try again")
	}
	return errdefs.New(errdefs.Storage, "%w", fmt.Errorf("copy data: %w", err))
}
