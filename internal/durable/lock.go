package durable

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Lock is an exclusive lock between processes. It is held until Unlock or the
// process's end, however it ends; the file stays and carries the holder's pid.
type Lock struct {
	f *os.File
}

// errLocked is what lockFile gives for a lock that another one holds.
var errLocked = errors.New("lock is held")

// Lock takes the lock of the file at path without waiting, creating the file
// if need be. A lock held by another process, or by another Lock of this one,
// is a CONFLICT that names the holder's pid.
func (f *FS) Lock(path string) (*Lock, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|noFollow, 0o600)
	if err != nil {
		return nil, wrap("lock", path, err)
	}
	err = lockFile(file)
	if errors.Is(err, errLocked) {
		pid := holder(file)
		_ = file.Close() // nothing was written
		return nil, errdefs.New(errdefs.Conflict, "lock %q: held by %s; stop it first", path, pid)
	}
	if err == nil {
		err = writePID(file)
	}
	if err != nil {
		_ = file.Close() // the first error says more
		return nil, wrap("lock", path, err)
	}
	return &Lock{f: file}, nil
}

// Unlock gives the lock back; a second call does nothing.
func (l *Lock) Unlock() error {
	if err := l.f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return wrap("unlock", l.f.Name(), err)
	}
	return nil
}

func writePID(file *os.File) error {
	if err := file.Truncate(0); err != nil {
		return err
	}
	_, err := file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

func holder(file *os.File) string {
	b, err := io.ReadAll(io.LimitReader(file, 32))
	pid, convErr := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || convErr != nil {
		return "another process"
	}
	return fmt.Sprintf("process %d", pid)
}
