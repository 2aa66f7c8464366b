// Package durable is the only door through which our own state reaches the
// disk: what it wrote survives a power cut once the method returned, and each
// create, write, sync, rename and commit is one step that a test can record or
// stop at. It is not a general file library: it knows nothing of what is in
// the files, and guests' disks are written elsewhere (it makes and syncs them).
package durable

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// Op is what a Step does.
type Op string

// The operations. Commit is a commit of the catalog; its Path is the name of
// the transaction.
const (
	OpCreate    Op = "create"
	OpWrite     Op = "write"
	OpSync      Op = "sync"
	OpSyncDir   Op = "syncdir"
	OpRename    Op = "rename"
	OpRemove    Op = "remove"
	OpRemoveAll Op = "removeall"
	OpMkdir     Op = "mkdir"
	OpChmod     Op = "chmod"
	OpCommit    Op = "commit"
)

// Step is one change of our state on disk, about to be made.
type Step struct {
	Op   Op
	Path string
	// To is the new path of a rename.
	To string
	// Bytes is the length of a write.
	Bytes int64
	// Perm is the mode of a chmod.
	Perm fs.FileMode
}

// String is the step as one line of a transcript.
func (s Step) String() string {
	switch s.Op {
	case OpRename:
		return fmt.Sprintf("rename %s -> %s", s.Path, s.To)
	case OpWrite:
		return fmt.Sprintf("write %d %s", s.Bytes, s.Path)
	case OpChmod:
		return fmt.Sprintf("chmod %04o %s", s.Perm, s.Path)
	}
	return string(s.Op) + " " + s.Path
}

// FS is the door. The zero value, and a nil *FS, write for real and are ready
// for use by several goroutines.
//
// Errors are of kind NO_SPACE where the disk or a quota is full, else STORAGE,
// and wrap the system's error. What Before returned is passed on as it is.
type FS struct {
	// Before, when not nil, is called before every step; an error stops the
	// step (a crash, for tests). It may be called by several goroutines.
	Before func(Step) error
}

// NewID returns 16 lower-case hexadecimal digits from the system's random
// source: the identity of a machine, run, layer, checkpoint or operation.
func NewID() string {
	var b [8]byte
	rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	return hex.EncodeToString(b[:])
}

// Commit makes a commit of the catalog one step: fn is called unless the step
// is stopped.
func (f *FS) Commit(name string, fn func() error) error {
	if err := f.step(Step{Op: OpCommit, Path: name}); err != nil {
		return err
	}
	return fn()
}

// WriteFile puts data into path so that a reader, or a boot after a power cut,
// finds either the old content or the new: a temporary file beside it is
// written and synced, renamed, and the folder synced.
func (f *FS) WriteFile(path string, data []byte, perm fs.FileMode) error {
	tmp := path + "." + NewID() + tempSuffix
	err := f.writeNew(tmp, data, perm)
	if err == nil {
		err = f.Rename(tmp, path)
	}
	if err != nil {
		f.discard(tmp)
		return err
	}
	return nil
}

func (f *FS) writeNew(path string, data []byte, perm fs.FileMode) error {
	file, err := f.CreateExclusive(path, perm)
	if err != nil {
		return err
	}
	if _, err = file.Write(data); err == nil {
		err = file.Sync()
	}
	if cerr := file.Close(); err == nil {
		err = cerr
	}
	return err
}

// Rename gives the file or folder old the name new, replacing a file of that
// name, and syncs the folder of new, and that of old if it is another.
func (f *FS) Rename(old, new string) error {
	if err := f.step(Step{Op: OpRename, Path: old, To: new}); err != nil {
		return err
	}
	if err := os.Rename(old, new); err != nil {
		return wrap("rename", old, err)
	}
	if err := f.SyncDir(filepath.Dir(new)); err != nil {
		return err
	}
	if filepath.Dir(old) != filepath.Dir(new) {
		return f.SyncDir(filepath.Dir(old))
	}
	return nil
}

// Remove removes one file or empty folder and syncs its folder. What is not
// there is no error. A symlink is removed, not followed.
func (f *FS) Remove(path string) error {
	if err := f.step(Step{Op: OpRemove, Path: path}); err != nil {
		return err
	}
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return wrap("remove", path, err)
	}
	return f.SyncDir(filepath.Dir(path))
}

// RemoveAll removes path and all in it and syncs its folder. It follows no
// symlink, not even one that appears while it works. What is not there is no error.
func (f *FS) RemoveAll(path string) error {
	if err := f.step(Step{Op: OpRemoveAll, Path: path}); err != nil {
		return err
	}
	root, err := os.OpenRoot(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return wrap("open folder", filepath.Dir(path), err)
	}
	err = root.RemoveAll(filepath.Base(path))
	_ = root.Close() // nothing was written through it
	if err != nil {
		return wrap("remove tree", path, err)
	}
	return f.SyncDir(filepath.Dir(path))
}

// Chmod sets the mode of a file that is not a symlink and syncs it.
func (f *FS) Chmod(path string, perm fs.FileMode) error {
	if err := f.step(Step{Op: OpChmod, Path: path, Perm: perm}); err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_RDONLY|noFollow, 0)
	if err != nil {
		return wrap("change mode of", path, err)
	}
	defer file.Close()
	if err := file.Chmod(perm); err != nil {
		return wrap("change mode of", path, err)
	}
	if err := file.Sync(); err != nil {
		return wrap("sync", path, err)
	}
	return nil
}

// Sync makes a file's content durable, whoever wrote it.
func (f *FS) Sync(path string) error {
	if err := f.step(Step{Op: OpSync, Path: path}); err != nil {
		return err
	}
	file, err := os.OpenFile(path, openForSync|noFollow, 0)
	if err != nil {
		return wrap("sync", path, err)
	}
	defer file.Close()
	if err := file.Sync(); err != nil {
		return wrap("sync", path, err)
	}
	return nil
}

// SyncDir makes the names in a folder durable.
func (f *FS) SyncDir(path string) error {
	if err := f.step(Step{Op: OpSyncDir, Path: path}); err != nil {
		return err
	}
	if err := syncDir(path); err != nil {
		return wrap("sync folder", path, err)
	}
	return nil
}

// RemoveTemps removes what interrupted WriteFiles left in a folder. Nobody may
// be writing in the folder.
func (f *FS) RemoveTemps(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return wrap("read folder", dir, err)
	}
	for _, e := range entries {
		if !isTemp(e.Name()) {
			continue
		}
		if err := f.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

const tempSuffix = ".tmp"

func isTemp(name string) bool {
	rest, ok := strings.CutSuffix(name, tempSuffix)
	dot := strings.LastIndexByte(rest, '.')
	if !ok || dot < 1 {
		return false
	}
	id, err := hex.DecodeString(rest[dot+1:])
	return err == nil && len(id) == 8
}

func (f *FS) step(s Step) error {
	if f == nil || f.Before == nil {
		return nil
	}
	return f.Before(s)
}

func wrap(verb, path string, err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	var le *os.LinkError
	if errors.As(err, &le) {
		err = le.Err
	}
	kind := errdefs.Storage
	switch {
	case errors.Is(err, syscall.ENOSPC) || errors.Is(err, errQuota):
		return errdefs.New(errdefs.NoSpace, "%s %q: %w; free some space on its file system", verb, path, err)
	case errors.Is(err, fs.ErrExist):
		kind = errdefs.AlreadyExists
	}
	return errdefs.New(kind, "%s %q: %w", verb, path, err)
}
